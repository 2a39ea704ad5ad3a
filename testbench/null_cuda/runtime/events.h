// Events, which have happened only some questions after they were recorded.
#pragma once

namespace null_cuda {

struct Stream;

// The host has waited for a stream, or for the whole device if it is null: what was recorded before has happened.
void let_happen(int device, const Stream *stream);

}  // namespace null_cuda
