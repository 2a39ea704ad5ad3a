// What a recording holds.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "comparison.h"
#include "shim_insight.h"

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

// Counts the numbers of a real, dense tensor. Nothing if it has none or is of another kind. Synchronizes.
std::optional<Numbers> count_numbers(const at::Tensor &t);

}  // namespace tamp

// Guarded by `mutex`, because the threads of several devices can run one backward pass.
struct tamp_recording {
  // Memory and tensors are held weakly: their numbers are freed as without a recording, but their addresses do not come
  // back.
  struct Memory {
    c10::weak_intrusive_ptr<c10::StorageImpl> held;
    int64_t number;
    int64_t parameter;
  };
  struct Known {
    c10::weak_intrusive_ptr<c10::TensorImpl> held;
    uint32_t version;
    std::optional<tamp::Numbers> numbers;
  };

  std::mutex mutex;
  size_t slot = 0;
  uint64_t handle = 0;
  bool running = false;
  std::string failure;
  std::deque<tamp::RecordedEvent> events;
  int64_t ended = 0;
  int64_t repeats = 0;
  std::optional<tamp::Comparison> comparison;
  std::unordered_set<std::string> names;
  std::unordered_map<uint64_t, std::vector<int64_t>> open;  // by thread
  std::unordered_map<const c10::StorageImpl *, Memory> memory;
  std::unordered_map<const c10::TensorImpl *, Known> known;
};
