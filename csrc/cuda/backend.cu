// Binding, the parameter block, graphs, and each step as its launches.
#include "cuda/backend.h"

#include <algorithm>

#include <unordered_set>
#include <utility>

#include "cuda/admit.h"
#include "cuda/factory.h"
#include "cuda/kernels.h"
#include "cuda/range.h"
#include "cuda/stream/steps.h"

namespace eaglex {

std::unique_ptr<Backend> make_cuda_backend(int device) {
  return std::make_unique<cuda::CudaBackend>(device);
}

}  // namespace eaglex

namespace eaglex::cuda {
namespace {

constexpr int kOldest = 8;  // sm_80: cp.async and bf16 products

// Calls f(range) for the launch's rows in chunks of at most `chunk`. Those of a prompt are equal, and whole tiles.
template <typename F>
void in_chunks(const Rows& rows, int chunk, F&& f) {
  constexpr int kTile = 128;
  if (chunk == 0) fail(ErrorCode::kDevice, "plain chain: expected only what bind() planned for, got another launch");
  if (rows.pass == Pass::kExtendAll && rows.max_rows > chunk && chunk >= kTile) {
    const int even = ceil_div(rows.max_rows, ceil_div(rows.max_rows, chunk));
    chunk = std::min(chunk, ceil_div(even, kTile) * kTile);
  }
  for (int first = 0; first < rows.max_rows; first += chunk)
    f(RowRange{rows, first, std::min(chunk, rows.max_rows - first)});
}

// Memory for what `carve` takes from a Workspace, which it is asked twice.
template <typename Allocate, typename Carve>
auto planned(Allocate&& allocate, Carve&& carve) {
  Workspace count;
  static_cast<void>(carve(count));
  Workspace workspace(allocate(count.used()));
  return carve(workspace);
}

std::byte* at_row(void* data, std::int64_t row, std::int64_t width, DType type) {
  return static_cast<std::byte*>(data) + static_cast<std::size_t>(row * width) * size_of(type);
}

}  // namespace

CudaBackend::CudaBackend(int device) : device_(device) {
  int count = 0;
  EAGLEX_CUDA_CHECK(cudaGetDeviceCount(&count));
  expect_range("device", device, 0, count - 1);
  const DeviceGuard guard(device_);
  int& major = compute_major_;
  EAGLEX_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_));
  EAGLEX_CUDA_CHECK(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device_));
  expect(major >= kOldest, ErrorCode::kDevice, "compute capability", concat("at least ", kOldest, ".0"), major);
  compiled_for_ = compiled_for();
}

// Frees wait until the device has done with what is freed: its own, which need not be the caller's current one.
CudaBackend::~CudaBackend() {
  int before = 0;
  if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device_) != cudaSuccess) return;  // a dead context
  graphs_.reset();
  fast_.reset();
  failed_.reset();
  memory_.clear();
  static_cast<void>(cudaSetDevice(before));
}

void* CudaBackend::allocate(std::size_t bytes) {
  const DeviceGuard guard(device_);
  memory_.push_back(allocate_device(bytes));
  return memory_.back().get();
}

Linear CudaBackend::prepare(std::span<const Matrix> parts) {
  Linear linear;
  for (const Matrix& part : parts) {
    if (!weight_type_ && !part.packed()) type_ = *(weight_type_ = part.dtype);
    expect(weight_type_.has_value(), ErrorCode::kShape, "weights", "fc before packed matrices", name_of(part.dtype));
    expect(part.packed() || part.dtype == *weight_type_, ErrorCode::kShape, "weights", name_of(*weight_type_),
           name_of(part.dtype));
    if (part.packed()) packed_.insert(part.data);
    linear.parts[linear.num_parts++] = part;
  }
  weights_.push_back(linear);
  return linear;
}

void CudaBackend::bind(const EngineContext& context) {
  const DeviceGuard guard(device_);
  context_ = context;
  k_.assign(context.kv.k, context.kv.k + context.config.num_layers);
  v_.assign(context.kv.v, context.kv.v + context.config.num_layers);
  context_.kv.k = nullptr;  // the device cannot follow it; launches carry the pointer of their layer
  context_.kv.v = nullptr;
  prepare_attention(context.config);
  const auto take = [this](std::size_t bytes) {
    workspace_bytes_ += bytes;
    return allocate(bytes);
  };
  block_ = planned(take, [](Workspace& workspace) {
    return DeviceBlock{workspace.take<DraftBatch>(1), workspace.take<std::int32_t>(kMaxSteps + 1)};
  });
  bind_fast();
  unpack_weights();
  buffers_ = planned(take, [&](Workspace& workspace) {
    return Buffers::carve(context_, type_, plain_work(), head_scores(), workspace);
  });
  chain_ = {context_, block_.batch, block_.drafting};
  graphs_ = std::make_unique<Graphs>(context_.limits, context_.speculation, block_);
}

void CudaBackend::know_tokens(const DraftedTokens& tokens) {
  const DeviceGuard guard(device_);
  const std::size_t bytes = fast_ ? fast_->token_bytes() : 0;
  if (bytes == 0) return;
  if (token_table_ == nullptr) {
    if (std::exchange(tried_token_table_, true)) return;  // graphs are without it by now
    try {
      token_table_ = allocate(bytes);
    } catch (const Error&) {  // no memory, or a dead context, which the next call finds: the table is speed alone
      return;
    }
    weight_bytes_ += bytes;
  }
  EAGLEX_CUDA_CHECK(cudaDeviceSynchronize());  // whatever still reads the table, or writes the embeddings
  fast_->know_tokens(tokens, token_table_);
}

void CudaBackend::bind_fast() {
  FastChain::Setup setup;
  setup.context = context_;
  setup.pool_k = k_;
  setup.pool_v = v_;
  setup.weights = weights_;
  setup.batch = block_.batch;
  setup.drafting = block_.drafting;
  setup.head_scores = head_scores();
  setup.compiled_for = compiled_for_;
  const auto counted = [this](std::size_t& count) {
    return [this, &count](std::size_t bytes) {
      count += bytes;
      return allocate(bytes);
    };
  };
  setup.device = counted(workspace_bytes_);
  setup.tiles = counted(weight_bytes_);
  setup.pinned = [this](std::size_t bytes) {
    failed_ = allocate_pinned(bytes);
    return failed_.get();
  };
  fast_ = FastChain::make(setup);
}

// The plain chain reads low-bit matrices in the activations' type. Beside those that stream it needs only what prompts
// read: K's and V's.
void CudaBackend::unpack_weights() {
  for (const Linear& linear : weights_) {
    for (int i = 0; i < linear.num_parts; ++i) {
      const Matrix& part = linear.parts[i];
      if (!part.packed() || (fast_ && !fast_->reads_original(part.data)) || unpacked_.contains(part.data)) continue;
      const std::size_t bytes = static_cast<std::size_t>(part.numel()) * size_of(type_);
      weight_bytes_ += bytes;
      void* const memory = allocate(bytes);
      launch_unpack(part, type_, memory, nullptr);
      unpacked_[part.data] = memory;
    }
  }
  EAGLEX_CUDA_CHECK(cudaStreamSynchronize(nullptr));  // the originals may be freed now
}

// Three parts are q, k and v: where q_proj is read by the fast chain alone, so is all that follows it.
PlainWork CudaBackend::plain_work() const {
  if (!fast_ || !stream::attends(stream::current_device(), context_.config.head_dim)) return PlainWork::kAll;
  const bool whole = std::ranges::any_of(weights_, [this](const Linear& linear) {
    return linear.num_parts == 3 && fast_->reads_original(linear.parts[0].data);
  });
  return whole ? PlainWork::kAll : PlainWork::kPrompts;
}

// An INT4 head may come with its rows as they were before, which nobody has said yet.
HeadScores CudaBackend::head_scores() const {
  const bool scans = std::ranges::any_of(weights_, [this](const Linear& linear) {
    const Matrix& part = linear.parts[0];
    return linear.num_parts == 1 && part.dtype == DType::kI4 && part.shape[0] == context_.config.draft_vocab_size &&
           part.shape[1] == context_.config.hidden_size;
  });
  return scans ? HeadScores::kMadeExact : HeadScores::kAsTheyAre;
}

// -------------------------------------------------------------------------------------------------- block and graphs

void CudaBackend::begin(const DraftBatch& batch, Stream stream) {
  const DeviceGuard guard(device_);
  batch_ = batch;
  stream_ = static_cast<cudaStream_t>(stream);
  if (fast_) fast_->check(stream_);
  launch_lanes_ = batch.batch;
  purpose_ = Purpose::kRun;
}

std::uint64_t CudaBackend::mark(Stream stream) {
  const DeviceGuard guard(device_);
  return calls_.mark(static_cast<cudaStream_t>(stream));
}

std::uint64_t CudaBackend::reached() {
  const DeviceGuard guard(device_);
  return calls_.reached();
}

// All at once, so that later cycles allocate nothing, whatever their size.
void CudaBackend::warm_up(const std::function<void(int, int)>& body) {
  if (graphs_->captured()) return;
  const DeviceGuard guard(device_);
  const RelaxedCapture relaxed;  // `run` may come here while its thread captures a stream of somebody else
  const cudaStream_t stream = stream_;
  const auto capture = [&](Graphs::Bucket size, cudaStream_t to) {
    stream_ = to;
    launch_lanes_ = size.lanes;
    body(size.lanes, size.rows);
  };
  const auto restore = [&] {
    purpose_ = Purpose::kRun;
    stream_ = stream;
    launch_lanes_ = batch_.batch;
  };
  try {
    purpose_ = Purpose::kRehearsal;
    rehearse(capture);
    purpose_ = Purpose::kGraph;
    graphs_->capture_all(capture);
  } catch (...) {
    restore();
    throw;
  }
  restore();
}

// Raw launches choose among kernels by the number of rows, and by whether the fast chain can read them: one cycle of
// each choice, captured and thrown away. Without that the first prompt would load its kernels while the server runs,
// which allocates and may wait for the whole device.
void CudaBackend::rehearse(const std::function<void(Graphs::Bucket, cudaStream_t)>& capture) {
  // 1: what is for one token alone. 64 rows come in two parts (FastChain), so 96 are what launches one of 64. The last:
  // all but the products that are for Hopper alone.
  constexpr int kRows[] = {1, 8, 16, 32, 64, 96, 128, 511};
  const EngineLimits& limits = context_.limits;
  const auto cycle = [&](int rows) {
    for (const bool readable : {true, false}) {
      if (readable && !fast_) continue;  // the plain chain makes no difference
      readable_ = readable;
      graphs_->discard([&](cudaStream_t to) {
        launch_store_block(batch_, block_, to);
        capture({std::min(limits.max_batch, rows), rows}, to);
        VerifyBatch verify;
        verify.batch = 1;
        launch_tree(context_, verify, num_sms_, to);
      });
    }
  };
  for (const int rows : kRows) {
    if (rows < limits.max_rows) cycle(rows);
  }
  cycle(limits.max_rows);
}

void CudaBackend::replay(int lanes, int rows, const std::function<void(int, int)>& body) {
  const StepRange step("cycle");
  const DeviceGuard guard(device_);
  cudaStreamCaptureStatus capture{};
  EAGLEX_CUDA_CHECK(cudaStreamIsCapturing(stream_, &capture));
  const int bucket = graphs_->find(lanes, rows);
  // Graphs hold the fuse of aligned bf16 rows.
  const bool readable = !fast_ || FastChain::reads(batch_);
  if (capture != cudaStreamCaptureStatusNone || bucket < 0 || !readable) return body(lanes, rows);
  warm_up(body);  // where the host has not
  graphs_->launch(bucket, batch_, stream_);
}

// -------------------------------------------------------------------------------------------------------------- steps

GemmParams CudaBackend::gemm_params(const RowRange& range, const Linear& weight) const {
  GemmParams params;
  params.batch = block_.batch;
  params.pass = range.rows.pass;
  params.drafting = drafting_flag(block_.drafting, range.rows);
  params.topk = context_.speculation.topk;
  params.first = range.first;
  params.max_rows = range.count;
  constexpr int kHopper = 9;
  params.hopper_sms = compute_major_ == kHopper && purpose_ != Purpose::kGraph ? num_sms_ : 0;
  params.in = static_cast<int>(weight.parts[0].shape[1]);
  params.x_stride = params.in;
  for (int i = 0; i < weight.num_parts; ++i) {
    const Matrix& part = weight.parts[i];
    params.weight[i] = part.packed() ? unpacked_.at(part.data) : part.data;
    params.outputs[i] = static_cast<int>(weight.parts[i].shape[0]);
  }
  return params;
}

void CudaBackend::admit() {
  const StepRange step("admit");
  const DeviceGuard guard(device_);
  if (purpose_ == Purpose::kRun) launch_store_block(batch_, block_, stream_);
  launch_admit(chain_, fast_ ? fast_->live_rows() : LiveRows{}, lanes(), stream_);
}

// The host's rows as they are, where they need neither norm nor conversion: for prompts only, where the copy costs.
bool CudaBackend::reads_aux_directly(const FuseParams& params) const {
  constexpr int kMany = 256;
  const auto address = reinterpret_cast<std::uintptr_t>(batch_.aux_hidden_states);
  const auto row_bytes = static_cast<std::size_t>(batch_.aux_stride) * size_of(type_);
  return purpose_ == Purpose::kRun && params.rows.max_rows >= kMany && context_.config.aux_norm == AuxNorm::kNone &&
         batch_.aux_type == type_ && address % 16 == 0 && row_bytes % 16 == 0;
}

bool CudaBackend::streams_fuse() const {
  if (!fast_) return false;
  return purpose_ == Purpose::kRun ? FastChain::reads(batch_) : purpose_ == Purpose::kGraph || readable_;
}

void CudaBackend::fuse(const FuseParams& params) {
  const StepRange step("fuse");
  const DeviceGuard guard(device_);
  if (streams_fuse() && fast_->fuse(params, stream_)) return;
  const int hidden = context_.config.hidden_size;
  const bool direct = reads_aux_directly(params);
  in_chunks(params.rows, direct ? params.rows.max_rows : buffers_.fuse_rows, [&](const RowRange& range) {
    GemmParams product = gemm_params(range, params.fc);
    if (direct) {
      product.x = batch_.aux_hidden_states;
      product.x_stride = batch_.aux_stride;
    } else {
      launch_fuse_input(chain_, type_, {range, params.aux_norms, buffers_.x}, stream_);
      product.x = buffers_.x;
    }
    product.out = at_row(params.hidden, range.first, hidden, type_);
    gemm(type_, product, stream_);
  });
}

void CudaBackend::qkv(const QkvParams& params) {
  const StepRange step("qkv");
  const DeviceGuard guard(device_);
  if (fast_ && fast_->qkv(params, stream_)) return;
  const bool queries = params.parts != QkvParts::kKeyValue;
  Linear weight = params.qkv;
  if (params.parts == QkvParts::kQuery) weight.num_parts = 1;
  if (params.parts == QkvParts::kKeyValue) weight = {{params.qkv.parts[1], params.qkv.parts[2]}, 2, nullptr};
  const auto layer = static_cast<std::size_t>(params.layer);
  const bool pool = params.target == KvTarget::kPool;
  in_chunks(params.rows, buffers_.qkv_rows, [&](const RowRange& range) {
    QkvInput input{range,
                   params.layer == 0,
                   params.gather,
                   params.embed_tokens.data,
                   params.input_layernorm.data,
                   params.hidden_norm.data,
                   params.hidden,
                   buffers_.x,
                   queries ? params.residual : nullptr};
    launch_qkv_input(chain_, type_, input, stream_);
    GemmParams product = gemm_params(range, weight);
    product.x = buffers_.x;
    product.epilogue = Epilogue::kFloat;
    product.out = buffers_.raw;
    gemm(type_, product, stream_);
    QkvOutput output{range,
                     params.parts,
                     params.target,
                     buffers_.raw,
                     params.inv_freq,
                     params.q,
                     pool ? k_[layer] : params.scratch_k,
                     pool ? v_[layer] : params.scratch_v};
    launch_qkv_output(chain_, type_, output, stream_);
  });
}

void CudaBackend::attention(const AttentionParams& params) {
  const StepRange step("attention");
  const DeviceGuard guard(device_);
  if (fast_ && fast_->attention(params, stream_)) return;
  const auto layer = static_cast<std::size_t>(params.layer);
  in_chunks(params.rows, buffers_.attention_rows, [&](const RowRange& range) {
    const AttentionLaunch attention{
        range, params.q, k_[layer], v_[layer], params.scratch_k, params.scratch_v, buffers_.attention, params.out};
    launch_attention(chain_, type_, attention, num_sms_, stream_);
  });
}

void CudaBackend::o_proj(const ProjectionParams& params) {
  const StepRange step("o_proj");
  project(params);
}

void CudaBackend::down(const ProjectionParams& params) {
  const StepRange step("down");
  project(params);
}

void CudaBackend::project(const ProjectionParams& params) {
  const DeviceGuard guard(device_);
  if (fast_ && fast_->project(params, stream_)) return;
  GemmParams product = gemm_params({params.rows, 0, params.rows.max_rows}, params.weight);
  product.x = params.x;
  product.residual = params.residual;
  product.out = params.out;
  gemm(type_, product, stream_);
}

void CudaBackend::gate_up(const GateUpParams& params) {
  const StepRange step("gate_up");
  const DeviceGuard guard(device_);
  if (fast_ && fast_->gate_up(params, stream_)) return;
  in_chunks(params.rows, buffers_.norm_rows, [&](const RowRange& range) {
    launch_norm_input(chain_, type_, {range, params.x, params.norm.data, buffers_.x, nullptr}, stream_);
    GemmParams product = gemm_params(range, params.gate_up);
    product.x = buffers_.x;
    product.epilogue = Epilogue::kSwiglu;
    product.out = at_row(params.out, range.first, context_.config.intermediate_size, type_);
    gemm(type_, product, stream_);
  });
}

void CudaBackend::head(const HeadParams& params) {
  const StepRange step("head");
  const DeviceGuard guard(device_);
  if (fast_ && fast_->head(params, stream_)) return;
  void* const replace = context_.config.next_hidden == NextHidden::kNormed ? params.hidden : nullptr;
  in_chunks(params.rows, buffers_.head_rows, [&](const RowRange& range) {
    launch_norm_input(chain_, type_, {range, params.hidden, params.norm.data, buffers_.x, replace}, stream_);
    GemmParams product = gemm_params(range, params.lm_head);
    product.x = buffers_.x;
    product.epilogue = Epilogue::kFloat;
    product.out = buffers_.logits;
    gemm(type_, product, stream_);
    const HeadOutput output{range, params.draft_step, buffers_.logits,         buffers_.ranked,
                            type_, buffers_.x,        params.rescore_rows.data};
    launch_head_output(chain_, output, stream_);
  });
}

void CudaBackend::select(const SelectParams& params) {
  const StepRange step("select");
  const DeviceGuard guard(device_);
  if (fast_ && fast_->select(params, stream_)) return;
  const Begin begin = fast_ && fast_->releases() ? Begin::kDependent : Begin::kAfterTheOneBefore;
  launch_select(chain_, params, lanes(), begin, stream_);
}

void CudaBackend::tree(const VerifyBatch& batch, Stream stream) {
  const StepRange step("tree");
  const DeviceGuard guard(device_);
  if (fast_) fast_->heal(static_cast<cudaStream_t>(stream));
  launch_tree(context_, batch, num_sms_, static_cast<cudaStream_t>(stream));
}

}  // namespace eaglex::cuda
