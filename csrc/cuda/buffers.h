// What lies between the kernels of one step of the plain chain, and how many rows go through at once.
#pragma once

#include "core/params.h"
#include "core/workspace.h"
#include "cuda/head_scores.h"

namespace eaglex::cuda {

// Which launches the plain chain may be asked for.
enum class PlainWork {
  kAll,
  // A streamed draft of one layer whose frontier the fast chain takes whole: only prompts, that is fuse and the
  // projections of K and V, and the fuse of rows that the fast chain cannot read.
  kPrompts,
};

struct Buffers {
  void* x = nullptr;           // [rows, input of a product]
  float* raw = nullptr;        // [qkv_rows, the parts' outputs]
  float* logits = nullptr;     // [head_rows, Vd]
  float* ranked = nullptr;     // [head_rows, segments, 2 + 2k], or more: head_partial_floats
  float* attention = nullptr;  // [attention_rows, partial results]
  // Rows that one pass takes; longer launches go through in chunks. 0: the pass never runs plain.
  int fuse_rows = 0;
  int qkv_rows = 0;
  int norm_rows = 0;  // gate_up
  int head_rows = 0;
  int attention_rows = 0;

  // `type` is that of the activations. With a Workspace that only counts, pointers are null.
  static Buffers carve(const EngineContext& context, DType type, PlainWork work, HeadScores scores,
                       Workspace& workspace);
};

}  // namespace eaglex::cuda
