// Whether the best of the head's scores may be made exact (core/rescore.h): buffers are planned for it.
#pragma once

namespace eaglex::cuda {

enum class HeadScores { kAsTheyAre, kMadeExact };

}  // namespace eaglex::cuda
