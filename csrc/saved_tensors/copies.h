// Copies of activations in another form, which are shared by all nodes that save the same activation, in whatever
// views.
//
// A copy has the elements of an activation in the order in which they lie in memory. A copy is found again by the
// activation's storage, its version and the part of the storage that is used. The copy refers to the storage weakly, so
// that no other storage can get the same address meanwhile.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/DimVector.h>

#include <memory>
#include <utility>

#include "saved_tensors/keeper.h"

namespace tamp {

// The form in which a copy is kept.
enum class CopyFormat : uint8_t { kHalf, kFp8Rows, kOnHost, kPart };

// The sizes and the strides of a tensor.
struct Places {
  explicit Places(const at::Tensor &t) : sizes(t.sizes()), strides(t.strides()) {}

  c10::DimVector sizes, strides;
};

// The numbers of a dense tensor in the order of its memory.
inline at::Tensor flat(const at::Tensor &dense) {
  return dense.as_strided({dense.numel()}, {1}, dense.storage_offset());
}

// Identifies a copy: the memory that was copied, and the form of the copy.
struct CopyKey {
  CopyKey(const at::Tensor &t, CopyFormat format);
  bool operator==(const CopyKey &other) const;

  const c10::StorageImpl *storage;
  const void *data;
  int64_t numel;
  at::ScalarType dtype;
  CopyFormat format;
  c10::StreamId stream;   // that made the copy: what finds it runs on the same stream, and so after the copy
  c10::DimVector places;  // the sizes and strides of a tensor that is not dense; else empty
};

// The elements of an activation in another form.
class SharedCopy {
 public:
  SharedCopy(const at::Tensor &t, CopyKey key);
  SharedCopy(const SharedCopy &) = delete;
  SharedCopy &operator=(const SharedCopy &) = delete;
  virtual ~SharedCopy();

  // Returns the numbers as one dimension, in the activation's dtype.
  virtual at::Tensor numbers() = 0;

  // The sizes and strides of the copied tensor; if it was not dense, those of its dense clone.
  const Places &places() const { return places_; }

 protected:
  // Returns the numbers of `t` as one dimension. If `t` is not dense, they are those of a dense clone.
  at::Tensor numbers_of(const at::Tensor &t);

 private:
  friend class SharedCopies;

  // Whether this is still a copy of `t`, which has the same key: of the same version of the same storage.
  bool fits(const at::Tensor &t) const;

  CopyKey key_;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_;
  c10::VariableVersion counter_;
  int64_t version_;
  Places places_;
};

// Returns what a node keeps instead of a small part of an activation: its numbers alone. Null for other tensors.
std::unique_ptr<Kept> keep_small_part(const at::Tensor &saved);

// All copies that are alive in the process.
class SharedCopies {
 public:
  // Returns what a node keeps instead of `t`: a view of the copy that other nodes keep, or else of one that `make`
  // makes.
  template <typename F>
  static std::unique_ptr<Kept> keep(const at::Tensor &t, CopyFormat format, const F &make) {
    const CopyKey key(t, format);
    auto copy = find(key, t);
    if (copy == nullptr) {
      copy = make(key);
      insert(key, copy);
    }
    return view(std::move(copy), t);
  }

 private:
  friend class SharedCopy;

  static std::shared_ptr<SharedCopy> find(const CopyKey &key, const at::Tensor &t);
  static void insert(const CopyKey &key, const std::shared_ptr<SharedCopy> &copy);
  static void erase(const CopyKey &key, const SharedCopy *copy);
  static std::unique_ptr<Kept> view(std::shared_ptr<SharedCopy> copy, const at::Tensor &t);
};

}  // namespace tamp
