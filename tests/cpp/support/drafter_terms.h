// What rank 0 and a dedicated drafter agree on, of a toy's sizes.
#pragma once

#include "bridge/bridge.h"

namespace support {

inline eaglex::bridge::Terms drafter_terms(int aux_width) {
  eaglex::bridge::Terms made;
  made.num_ranks = 1;
  made.max_lanes = 3;
  made.num_draft_tokens = 4;
  made.num_steps = 3;
  made.num_slots = 4;
  made.vocab_size = 100000;
  made.aux_width = aux_width;
  made.max_rows = 8;
  return made;
}

}  // namespace support
