// send_rows: one request's rows into the drafter's memory, then its epoch. Called on rank 0 behind the target's forward.
// take_rows: waits for that epoch. Called on the drafter in front of its engine.
// Bytes: the rows once, over the link.
// Blocks over the hidden states, 16 bytes per thread and turn; the first block has the rest. The last to finish says so.
#include "bridge/push.cuh"
#include "bridge/relay.h"

namespace eaglex::bridge {
namespace {

constexpr unsigned kCopyThreads = 256;
constexpr unsigned kMostBlocks = 64;

struct alignas(16) Words {
  std::uint32_t word[4];
};

// Rows of `count` elements of T each, `stride` apart, to where they lie without gaps.
template <typename T>
__device__ void copy_rows(const DraftBatch& batch, std::size_t row_bytes, std::size_t stride_bytes, std::byte* to) {
  const std::size_t per_row = row_bytes / sizeof(T);
  const std::size_t all = per_row * static_cast<std::size_t>(batch.num_rows);
  const auto* const from = static_cast<const std::byte*>(batch.aux_hidden_states);
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < all; i += step) {
    const std::size_t row = i / per_row;
    reinterpret_cast<T*>(to)[i] = reinterpret_cast<const T*>(from + row * stride_bytes)[i - row * per_row];
  }
}

struct Widths {
  std::size_t row = 0, stride = 0;  // bytes
  bool wide = false;                // all of it in steps of 16
};

// Rows of the host's table that travel, each up to its request's length before these rows, and all rows' KV slots.
__device__ void send_table(const SendRows& rows) {
  const DraftBatch& batch = rows.batch;
  const std::int64_t width = rows.table.width;
  const std::int64_t first = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = first; i < batch.num_rows; i += step) {
    rows.to.out_cache_loc[i] = static_cast<std::int32_t>(batch.out_cache_loc[i]);
  }
  for (int lane = 0; lane < batch.batch; ++lane) {
    const std::int64_t slot = batch.req_pool_indices[lane];
    const std::int64_t length = batch.seq_lens[lane];
    const bool travels = rows.entries.has(lane) && slot > 0 && slot < rows.table.num_slots && length > 0;
    const std::int64_t count = travels ? (length < width ? length : width) : 0;
    if (first == 0) rows.to.table_lens[lane] = static_cast<std::int32_t>(count);
    for (std::int64_t i = first; i < count; i += step) {
      rows.to.table[lane * width + i] = rows.table.entries[slot * width + i];
    }
  }
}

// As write_table of rows.cpp.
__device__ void take_table(const TakeRows& rows) {
  const std::int64_t width = rows.table.width;
  for (int lane = 0; lane < rows.num_lanes; ++lane) {
    const std::int64_t slot = rows.from.slots[lane];
    if (slot <= 0 || slot >= rows.table.num_slots) continue;
    std::int32_t* const row = rows.table.entries + slot * width;
    const std::int64_t length = rows.from.seq_lens[lane];
    const std::int32_t entries = rows.from.table_lens[lane];
    for (int i = thread(); i < entries; i += threads()) row[i] = rows.from.table[lane * width + i];
    const std::int32_t begin = rows.from.row_start[lane];
    const std::int32_t there = rows.from.row_start[lane + 1] - begin;
    const std::int32_t count = rows.from.num_valid[lane] < there ? rows.from.num_valid[lane] : there;
    for (std::int32_t i = thread(); length >= 0 && i < count && length < width - i; i += threads()) {
      row[length + i] = rows.from.out_cache_loc[begin + i];
    }
  }
}

// A request in front of this one has failed: the drafter is not to wait for these rows. What is kept of them is nobody, as
// `receive` would else take the drafts from the requests of the last rows that went out, whose drafts may still be due.
__device__ void send_nothing(const SendRows& rows) {
  if (blockIdx.x != 0) return;
  for (int lane = thread(); lane < rows.batch.batch; lane += threads()) {
    rows.kept.slots[lane] = 0;
    const std::int64_t slot = rows.batch.req_pool_indices[lane];
    if (!in_range(slot, rows.num_slots)) continue;
    rows.results.num_nodes[slot] = 0;
    rows.results.drafted_for[slot] = -1;
  }
  if (threadIdx.x != 0) return;
  write_now(rows.to.off, rows.epoch);
  __threadfence_system();
  write_now(rows.to.arrived, rows.epoch);
}

__global__ void __launch_bounds__(kCopyThreads) send_rows_kernel(const __grid_constant__ SendRows rows, Widths widths) {
  wait_for_producers();
  const DraftBatch& batch = rows.batch;
  if (!rows.afresh && *rows.failed != 0) return send_nothing(rows);
  if (widths.wide) {
    copy_rows<Words>(batch, widths.row, widths.stride, rows.to.aux);
  } else {
    copy_rows<std::uint16_t>(batch, widths.row, widths.stride, rows.to.aux);
  }
  if (rows.table.width > 0) send_table(rows);
  if (blockIdx.x == 0) {
    if (rows.failed != nullptr && threadIdx.x == 0) *rows.failed = 0;
    for (int i = thread(); i < batch.num_rows; i += threads()) rows.to.input_ids[i] = batch.input_ids[i];
    for (int lane = thread(); lane <= batch.batch; lane += threads()) rows.to.row_start[lane] = batch.row_start[lane];
    for (int lane = thread(); lane < batch.batch; lane += threads()) {
      const std::int64_t slot = batch.req_pool_indices[lane];
      const std::int64_t asked = rows.wanted.has(lane) ? slot : 0;
      rows.kept.slots[lane] = rows.to.slots[lane] = asked;
      rows.kept.lens[lane] = rows.to.seq_lens[lane] = batch.seq_lens[lane];
      rows.kept.num_valid[lane] = rows.to.num_valid[lane] = batch.num_valid[lane];
      rows.to.draft_from[lane] = batch.draft_from[lane];
      if (!in_range(slot, rows.num_slots)) continue;
      rows.results.num_nodes[slot] = 0;  // until the reply is here
      rows.results.drafted_for[slot] = -1;
    }
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  __threadfence_system();  // this block's part is there before it counts as finished
  if (atomicAdd(rows.finished, 1ULL) + 1 < gridDim.x) return;
  *rows.finished = 0;
  __threadfence_system();
  write_now(rows.to.arrived, rows.epoch);
}

__global__ void take_rows_kernel(const __grid_constant__ TakeRows rows) {
  __shared__ std::int32_t there;
  wait_for_producers();
  if (threadIdx.x == 0) {
    const std::uint64_t begun = now_ns();
    std::uint64_t latest = read_now(rows.from.arrived);  // later ones mean that these will not come
    while (latest < rows.epoch && now_ns() - begun < rows.deadline_ns && read_now(&rows.status->stop) == 0) {
      for (unsigned i = 0; i < 1000 && latest < rows.epoch; ++i) latest = read_now(rows.from.arrived);
    }
    __threadfence_system();  // the rows were written before the epoch was
    there = latest == rows.epoch && read_now(rows.from.off) != rows.epoch ? 1 : 0;
  }
  __syncthreads();
  if (there != 0) {
    if (rows.table.width > 0) take_table(rows);
    return;
  }
  for (int lane = thread(); lane < rows.num_lanes; lane += threads()) {
    rows.from.slots[lane] = 0;
    rows.from.draft_from[lane] = 0;
    rows.from.num_valid[lane] = 0;
    rows.from.seq_lens[lane] = 0;
  }
}

template <typename Kernel, typename... Args>
void run(const char* what, Kernel kernel, unsigned blocks, unsigned block_threads, Stream stream, const Args&... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(block_threads);
  config.stream = static_cast<cudaStream_t>(stream);
  check_cuda(cudaLaunchKernelEx(&config, kernel, args...), what);
}

}  // namespace

void launch_send_rows(const SendRows& rows, int width, Stream stream) {
  const std::size_t element = size_of(rows.batch.aux_type);
  Widths widths = {static_cast<std::size_t>(width) * element,
                   static_cast<std::size_t>(rows.batch.aux_stride) * element};
  const auto address = reinterpret_cast<std::uintptr_t>(rows.batch.aux_hidden_states);
  widths.wide = (address | widths.row | widths.stride) % sizeof(Words) == 0;
  const std::size_t steps = widths.row * static_cast<std::size_t>(rows.batch.num_rows) / sizeof(Words) / kCopyThreads;
  const auto blocks = static_cast<unsigned>(std::clamp<std::size_t>(steps, 1, kMostBlocks));
  run("rows to the drafter", send_rows_kernel, blocks, kCopyThreads, stream, rows, widths);
}

void launch_take_rows(const TakeRows& rows, Stream stream) {
  run("rows from rank 0", take_rows_kernel, 1U, 64U, stream, rows);
}

}  // namespace eaglex::bridge
