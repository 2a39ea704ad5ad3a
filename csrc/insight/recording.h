// What a recording holds.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "insight/comparison.h"
#include "insight/shim_insight.h"

namespace tamp {

struct RecordedEvent {
  tamp_recorded_event raw{};
  std::vector<tamp_recorded_tensor> inputs, outputs;
};

// The numbers in a tensor.
struct Numbers {
  int64_t positive_infinite = 0, negative_infinite = 0, nan = 0;
  double largest = 0;

  bool finite() const { return positive_infinite + negative_infinite + nan == 0; }
};

// The tensor itself, or the values of a sparse one.
at::Tensor dense_part(const at::Tensor &t);

// Counts the numbers of a real tensor, or of the values of a sparse one. Nothing if it has none or is of another kind.
// Synchronizes.
std::optional<Numbers> count_numbers(const at::Tensor &t);

// Calls `f` with each defined tensor of an argument or result.
template <typename F>
void for_each_tensor(const c10::IValue &value, const F &f) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) f(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue &element : value.toListRef()) for_each_tensor(element, f);
  } else if (value.isTuple()) {
    for (const c10::IValue &element : value.toTupleRef().elements()) for_each_tensor(element, f);
  }
}

// ------------------------------------------------------------------------------------------------- insight/insight.cpp
// Ties the node of a custom function to the place of the program that called the function. Recordings see no other sign
// of it, because autograd is off while forward runs.
void note_function(std::string_view name, uint64_t thread, uint64_t sequence);

// -------------------------------------------------------------------------------------------------- insight/timing.cpp
// The nanoseconds of a clock that only advances.
int64_t now();

// The devices of the tensors among arguments or results that compute asynchronously, added to `devices`.
void add_devices(std::vector<c10::Device> &devices, c10::ArrayRef<const c10::IValue> values);
void synchronize(const std::vector<c10::Device> &devices);

// The booleans among arguments, in their order.
uint32_t flags_of(c10::ArrayRef<const c10::IValue> arguments);

// The dtype of the region in which an operator with these arguments is called, or -1.
int8_t autocast_of(c10::ArrayRef<const c10::IValue> arguments);

// The shape, dtype and device of a tensor.
void describe_layout(tamp_recorded_tensor &out, const at::Tensor &t);

}  // namespace tamp

// Guarded by `mutex`, because the threads of several devices can run one backward pass.
struct tamp_recording {
  // Memory and tensors are held weakly: their numbers are freed as without a recording, but their addresses do not come
  // back.
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> held;
    int64_t number;
    // The parameters in it, several of which can share a storage, with their first byte and that behind the last.
    struct Parameter {
      int64_t begin, end, index;
    };
    std::vector<Parameter> parameters;

    // The parameter of which a tensor is a part, or -1.
    int64_t parameter_at(const at::Tensor &t) const;
  };
  struct Known {
    c10::weak_intrusive_ptr<c10::TensorImpl> held;
    std::optional<tamp::Numbers> numbers;
  };

  std::mutex mutex;
  size_t slot = 0;
  uint64_t handle = 0;
  bool running = false;
  // Whether nothing may be added any more. Under the lock.
  bool stopped = false;
  // Until it is freed. Operators that are still running on other threads keep it alive as well.
  std::shared_ptr<tamp_recording> itself;
  bool timed = false;
  std::string failure;
  std::deque<tamp::RecordedEvent> events;
  int64_t ended = 0;
  int64_t repeats = 0;
  std::optional<tamp::Comparison> comparison;
  struct Saved {
    tamp_saved_tensor raw{};
    c10::weak_intrusive_ptr<c10::StorageImpl> held;
  };
  std::vector<Saved> saved;
  std::unordered_set<std::string> names;
  std::unordered_map<uint64_t, std::vector<int64_t>> open;  // by thread
  std::unordered_map<const c10::StorageImpl *, Memory> memory;
  std::unordered_map<const c10::TensorImpl *, Known> known;
};

namespace tamp {

// The storage of a dense tensor, or null.
const c10::StorageImpl *storage(const at::Tensor &t);
// The memory of a dense tensor, which is new if it did not appear before; null if it has none. Under the lock.
tamp_recording::Memory *memory_of(tamp_recording &recording, const at::Tensor &t);
void add_parameter(tamp_recording &recording, const at::Tensor &t, size_t index);

}  // namespace tamp
