// Which tensors are activations, and the copies of them that nodes share.

#include "saved_tensors/copies.h"

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string_view>
#include <typeinfo>
#include <unordered_map>

#include "gradients/storage.h"

namespace tamp {
namespace {

using at::Tensor;

// A tensor with fewer numbers is kept as it is: another form would gain nothing.
constexpr int64_t kFewestNumbers = 4096;

// The name of a node's class without its namespaces. Node::name() would allocate a string for it.
std::string_view class_of(const torch::autograd::Node &node) {
  std::string_view name = typeid(node).name();  // such as N5torch8autograd9generated15ToCopyBackward0E
  if (!name.empty() && name.back() == 'E') name.remove_suffix(1);
  const size_t letter = name.find_last_not_of("0123456789");
  const size_t digit = letter == std::string_view::npos ? letter : name.find_last_of("0123456789", letter);
  return digit == std::string_view::npos ? name : name.substr(digit + 1);
}

// The nodes of views and casts: their result still counts as the weight.
constexpr std::string_view kViewsAndCasts[] = {
    "ToCopyBackward0",    "TBackward0",          "TransposeBackward0",    "PermuteBackward0",
    "ViewBackward0",      "UnsafeViewBackward0", "ReshapeAliasBackward0", "AliasBackward0",
    "AsStridedBackward0", "CloneBackward0",      "ExpandBackward0",       "SliceBackward0",
    "SelectBackward0",    "SqueezeBackward0",    "SqueezeBackward1",      "SqueezeBackward2",
    "UnsqueezeBackward0", "SplitBackward0",      "UnsafeSplitBackward0",  "SplitWithSizesBackward0",
    "UnbindBackward0",    "DiagonalBackward0",   "UnfoldBackward0",       "UnsafeSplitWithSizesBackward0",
};

// Whether a small error of a saved tensor would become a large one in a derivative. Logarithms of probabilities and of
// sums of exponentials are exponentiated there, and a statistic that a normalization returns beside its result scales a
// whole group of numbers.
bool is_delicate(const Tensor &saved) {
  const auto node = saved.grad_fn();
  if (node == nullptr) return false;
  const auto name = class_of(*node);
  if (name == "LogSoftmaxBackward0" || name == "LogsumexpBackward0") return true;
  return saved.output_nr() > 0 && name.find("NormBackward") != std::string_view::npos;
}

struct HashOfKey {
  size_t operator()(const CopyKey &key) const {
    const auto mixed = reinterpret_cast<uintptr_t>(key.data) ^ (reinterpret_cast<uintptr_t>(key.storage) >> 4);
    return std::hash<uint64_t>()(mixed * 0x9e3779b97f4a7c15U + static_cast<uint64_t>(key.numel));
  }
};

struct CopyEntry {
  std::weak_ptr<SharedCopy> copy;
  const SharedCopy *address;
};

// The copies that are alive, by key.
struct CopyTable {
  std::mutex mutex;
  std::unordered_map<CopyKey, CopyEntry, HashOfKey> entries;
};

// Never destroyed: graphs may be freed while the process ends.
CopyTable &copy_table() {
  static auto *const table = new CopyTable();
  return *table;
}

// What a node keeps: a copy, and the sizes and strides of the view that the node saved.
class ViewOfCopy final : public Kept {
 public:
  ViewOfCopy(std::shared_ptr<SharedCopy> copy, Places places) : copy_(std::move(copy)), places_(std::move(places)) {}

  Tensor restore() override {
    const at::AutoDispatchBelowADInplaceOrView numbers_only;
    return copy_->numbers().as_strided(places_.sizes, places_.strides);
  }

 private:
  std::shared_ptr<SharedCopy> copy_;
  Places places_;
};

class PartCopy final : public SharedCopy {
 public:
  PartCopy(const Tensor &t, const CopyKey &key) : SharedCopy(t, key), numbers_(numbers_of(t).clone()) {}

  Tensor numbers() override { return numbers_; }

 private:
  Tensor numbers_;
};

// Whether a tensor has numbers of its own that are computed from others.
bool is_computed(const Tensor &t) {
  if (t.is_leaf() || !at::isFloatingType(t.scalar_type()) || t.is_meta()) return false;
  return has_own_numbers(t) && !overlaps(t) && !is_of_leaf(t);
}

}  // namespace

bool is_of_leaf(const Tensor &t) {
  // The most views and casts in a row that are followed.
  constexpr int kLongest = 8;
  auto node = t.grad_fn();
  for (int i = 0; node != nullptr && i < kLongest; ++i) {
    const auto name = class_of(*node);
    if (name == "AccumulateGrad") return true;
    const auto *const end = std::end(kViewsAndCasts);
    if (std::find(std::begin(kViewsAndCasts), end, name) == end || node->num_outputs() != 1) return false;
    node = node->next_edge(0).function;
  }
  return false;
}

bool is_activation(const Tensor &saved) {
  return is_computed(saved) && saved.numel() >= kFewestNumbers && !is_delicate(saved);
}

bool is_small_part(const Tensor &saved) {
  if (!is_computed(saved) || saved.numel() >= kFewestNumbers) return false;
  return saved.storage().nbytes() >= kFewestNumbers * saved.dtype().itemsize();
}

std::unique_ptr<Kept> keep_small_part(const Tensor &saved) {
  if (!is_small_part(saved)) return nullptr;
  const at::AutoDispatchBelowADInplaceOrView numbers_only;
  return SharedCopies::keep(saved, CopyFormat::kPart,
                            [&](const CopyKey &key) { return std::make_shared<PartCopy>(saved, key); });
}

CopyKey::CopyKey(const Tensor &t, CopyFormat format)
    : storage(t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl()),
      data(t.const_data_ptr()),
      numel(t.numel()),
      dtype(t.scalar_type()),
      format(format),
      stream(c10::impl::VirtualGuardImpl(t.device().type()).getStream(t.device()).id()) {
  if (t.is_non_overlapping_and_dense()) return;
  places.append(t.sizes().begin(), t.sizes().end());
  places.append(t.strides().begin(), t.strides().end());
}

bool CopyKey::operator==(const CopyKey &other) const {
  return storage == other.storage && data == other.data && numel == other.numel && dtype == other.dtype &&
         format == other.format && stream == other.stream && places == other.places;
}

SharedCopy::SharedCopy(const Tensor &t, CopyKey key)
    : key_(std::move(key)),
      storage_(t.unsafeGetTensorImpl()->unsafe_storage().getWeakStorageImpl()),
      counter_(t.unsafeGetTensorImpl()->version_counter()),
      version_(static_cast<int64_t>(counter_.current_version())),
      places_(t) {}

SharedCopy::~SharedCopy() { SharedCopies::erase(key_, this); }

bool SharedCopy::fits(const Tensor &t) const {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void *), "a version is a pointer to a counter");
  const auto &counter = t.unsafeGetTensorImpl()->version_counter();
  const bool is_same = std::memcmp(static_cast<const void *>(&counter), &counter_, sizeof counter) == 0;
  return is_same && static_cast<int64_t>(counter.current_version()) == version_;
}

Tensor SharedCopy::numbers_of(const Tensor &t) {
  if (t.is_non_overlapping_and_dense()) return flat(t);
  const Tensor copy = t.clone();
  places_ = Places(copy);
  return flat(copy);
}

std::shared_ptr<SharedCopy> SharedCopies::find(const CopyKey &key, const Tensor &t) {
  std::shared_ptr<SharedCopy> copy;
  {
    CopyTable &table = copy_table();
    const std::lock_guard<std::mutex> lock(table.mutex);
    const auto found = table.entries.find(key);
    if (found != table.entries.end()) copy = found->second.copy.lock();
  }
  return copy != nullptr && copy->fits(t) ? copy : nullptr;
}

void SharedCopies::insert(const CopyKey &key, const std::shared_ptr<SharedCopy> &copy) {
  CopyTable &table = copy_table();
  const std::lock_guard<std::mutex> lock(table.mutex);
  table.entries[key] = {copy, copy.get()};
}

void SharedCopies::erase(const CopyKey &key, const SharedCopy *copy) {
  CopyTable &table = copy_table();
  const std::lock_guard<std::mutex> lock(table.mutex);
  const auto found = table.entries.find(key);
  // A newer copy may have this key by now.
  if (found != table.entries.end() && found->second.address == copy) table.entries.erase(found);
}

std::unique_ptr<Kept> SharedCopies::view(std::shared_ptr<SharedCopy> copy, const Tensor &t) {
  auto places = t.is_non_overlapping_and_dense() ? Places(t) : copy->places();
  return std::make_unique<ViewOfCopy>(std::move(copy), std::move(places));
}

}  // namespace tamp
