// Packets of 16 bytes between devices: {data, flag, data, flag}. Each half of 8 bytes is one store that arrives whole, so
// a half whose flag is this epoch's has this epoch's data: no fence and no second trip.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#ifndef __CUDACC__
#include <atomic>
#include <chrono>
#endif

namespace eaglex::bridge {

struct alignas(16) Packet {
  std::uint32_t data0;
  std::uint32_t flag0;
  std::uint32_t data1;
  std::uint32_t flag1;
};

#ifdef __CUDACC__
// Volatile accesses are relaxed at system scope: to peers' memory and to host memory alike.
__device__ inline void store_packet(Packet* to, const Packet& packet) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(packet.data0), "r"(packet.flag0),
               "r"(packet.data1), "r"(packet.flag1)
               : "memory");
}
__device__ inline Packet load_packet(const Packet* from) {
  Packet packet;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(packet.data0), "=r"(packet.flag0), "=r"(packet.data1), "=r"(packet.flag1)
               : "l"(from)
               : "memory");
  return packet;
}
// Nanoseconds of the device's global timer, whose steps are up to 1 µs.
__device__ inline std::uint64_t now_ns() {
  std::uint64_t now = 0;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
#else  // the emulator (tests/emulator): threads take turns, but the other end may be another process
inline void store_packet(Packet* to, const Packet& packet) {
  volatile Packet& there = *to;
  there.data0 = packet.data0;
  there.data1 = packet.data1;
  std::atomic_thread_fence(std::memory_order_release);
  there.flag0 = packet.flag0;
  there.flag1 = packet.flag1;
}
inline Packet load_packet(const Packet* from) {
  const volatile Packet& there = *from;
  Packet packet;
  packet.flag0 = there.flag0;
  packet.flag1 = there.flag1;
  std::atomic_thread_fence(std::memory_order_acquire);
  packet.data0 = there.data0;
  packet.data1 = there.data1;
  return packet;
}
inline std::uint64_t now_ns() {
  emulator::pause();
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}
#endif

}  // namespace eaglex::bridge
