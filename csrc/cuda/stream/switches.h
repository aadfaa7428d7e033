// The environment variables that choose among ways of streaming (docs/kernels.md).
#pragma once

namespace eaglex::stream {

// Throws ErrorCode::kConfig where EAGLEX_PDL or EAGLEX_STREAM_REDUCTION holds something that is no choice. make_plan
// reads them; to be asked before weights are moved.
void check_switches();

}  // namespace eaglex::stream
