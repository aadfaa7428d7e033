// What a device must be able to do: one function per step of the loop, the names of docs/design.md. A backend does not
// know why it is called; the order is csrc/draft/loop.cpp's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>

#include "core/params.h"
#include "core/weights.h"

namespace eaglex {

// Behind the last step of a cycle: where to launch what is to follow it, and where its kernels find the batch, which has up
// to `lanes` requests.
struct CycleEnd {
  const DraftBatch* batch = nullptr;
  int lanes = 0;
  Stream stream = nullptr;
};

class Backend {
 public:
  Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;
  virtual ~Backend() = default;

  [[nodiscard]] virtual const char* name() const noexcept = 0;
  [[nodiscard]] virtual Device device() const noexcept = 0;
  // Type of hidden states, q, attention output and SwiGLU output between the steps.
  [[nodiscard]] virtual DType activation_type() const noexcept = 0;

  // Memory for the workspace, zeroed; called while planning only, freed with the backend.
  [[nodiscard]] virtual void* allocate(std::size_t bytes) = 0;
  // Brings matrices that are read together into the backend's own order.
  [[nodiscard]] virtual Linear prepare(std::span<const Matrix> parts) = 0;
  // Called once, after planning, before the first launch. The arrays behind context.kv.k and .v lie in host memory.
  virtual void bind(const EngineContext& context) = 0;

  // Called behind bind(), and again where the embeddings have changed: a backend may compute beforehand what follows from
  // a drafted token alone. Waits for the device.
  virtual void know_tokens(const DraftedTokens&) {}

  // Whether launches still read this matrix of prepare()'s where it lies. If not, it may be freed once bind() is done.
  [[nodiscard]] virtual bool reads_original(const void*) const { return true; }

  // Device memory that was taken beside what allocate() was asked for: buffers between the kernels, and weights in the
  // backend's own order (which take the place of the originals that reads_original() gives up). Known after bind().
  [[nodiscard]] virtual std::size_t own_workspace_bytes() const noexcept { return 0; }
  [[nodiscard]] virtual std::size_t own_weight_bytes() const noexcept { return 0; }

  // Makes `batch` the parameter block of the launches that follow, which go to `stream`.
  virtual void begin(const DraftBatch& batch, Stream stream) = 0;
  // Everything that a first cycle would otherwise do late: a backend with graphs captures `body` for every bucket. The
  // device must not be capturing. Costs seconds at most; a second call costs nothing.
  virtual void warm_up(const std::function<void(int lanes, int rows)>& body) = 0;
  // Runs `body` for at least that many lanes and rows; a backend with graphs rounds up to a bucket and replays what it
  // captured.
  virtual void replay(int lanes, int rows, const std::function<void(int lanes, int rows)>& body) = 0;

  // To be asked within a cycle, a captured one too.
  [[nodiscard]] virtual CycleEnd cycle_end() const { return {}; }

  // How long a call's tensors are read. mark() ends a call and gives its number: 0 where it has run already, kNever
  // where a host captures the stream, whose replays may read the tensors at any time. reached() is the number up to
  // which all calls have run. Both cost about a microsecond and wait for nothing.
  static constexpr std::uint64_t kNever = ~std::uint64_t{0};
  virtual std::uint64_t mark(Stream) { return 0; }
  [[nodiscard]] virtual std::uint64_t reached() { return 0; }

  virtual void admit() = 0;  // lane status, new length: which requests are drafted for
  virtual void fuse(const FuseParams& params) = 0;
  virtual void qkv(const QkvParams& params) = 0;
  virtual void attention(const AttentionParams& params) = 0;
  virtual void o_proj(const ProjectionParams& params) = 0;
  virtual void gate_up(const GateUpParams& params) = 0;
  virtual void down(const ProjectionParams& params) = 0;
  virtual void head(const HeadParams& params) = 0;
  virtual void select(const SelectParams& params) = 0;
  virtual void tree(const VerifyBatch& batch, Stream stream) = 0;
};

}  // namespace eaglex
