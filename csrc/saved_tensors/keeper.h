// The forms in which tensors are kept that autograd saves for a backward pass.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/DimVector.h>
#include <c10/util/Exception.h>

#include <memory>
#include <string>

#include "border/shim.h"

namespace tamp {

// The version of a saved tensor. Refuses one that was changed in place afterwards, which libtorch leaves to hooks if
// there are some.
class SavedVersion {
 public:
  SavedVersion() = default;
  explicit SavedVersion(const at::Tensor &saved)
      : counter_(saved.unsafeGetTensorImpl()->version_counter()),
        version_(counter_.current_version()),
        dtype_(saved.scalar_type()) {
    if (!saved.is_nested()) sizes_ = saved.sizes();
  }

  void check() const {
    const auto now = counter_.current_version();
    TORCH_CHECK(now == version_,
                "one of the variables needed for gradient computation has been modified by an inplace operation: [",
                dtype_, " ", c10::IntArrayRef(sizes_), "] is at version ", now, "; expected version ", version_,
                " instead. Compute a new tensor in place of changing this one");
  }

  // Takes the present version for the expected one.
  void renew() { version_ = counter_.current_version(); }

 private:
  c10::VariableVersion counter_;
  uint32_t version_ = 0;
  at::ScalarType dtype_ = at::kFloat;
  c10::DimVector sizes_;
};

// A saved tensor in the form in which it is kept.
class Kept {
 public:
  Kept() = default;
  Kept(const Kept &) = delete;
  Kept &operator=(const Kept &) = delete;
  virtual ~Kept() = default;

  // Returns the tensor for a backward pass, without a history. Several threads may call it at once, and each of them
  // several times.
  virtual at::Tensor restore() = 0;

  // Whether `restore` checks the tensor's version, which is checked before otherwise.
  virtual bool checks_version() const { return false; }
};

// A way in which saved tensors are kept. Threads share it.
class Keeper {
 public:
  Keeper() = default;
  Keeper(const Keeper &) = delete;
  Keeper &operator=(const Keeper &) = delete;
  virtual ~Keeper() = default;

  // Returns the form in which a tensor is kept, or null if the tensor itself is. Gradients are off meanwhile, and the
  // thread is outside of its regions.
  virtual std::unique_ptr<Kept> keep(const at::Tensor &saved) = 0;

  // Whether every bit of a tensor is kept.
  virtual bool is_exact() const { return false; }

  // Records a tensor that a node of this crate keeps by itself.
  virtual void note(const at::Tensor &) {}

  // Ends a region of this keeper.
  virtual void end() noexcept {}
};

// Makes autograd ask this crate in which form to keep what it saves. Returns an empty string if that succeeds. If
// another engine than libtorch's own is in place, nothing changes, and the name of its type is returned.
std::string prepare_saved_tensors();

// The keeper of the innermost region of the calling thread, or null.
std::shared_ptr<Keeper> current_keeper();

// Tells the current keeper of a tensor that a node of this crate keeps by itself, if the tensor is defined.
inline void note_kept(const at::Tensor &kept) {
  if (!kept.defined()) return;
  if (const auto keeper = current_keeper()) keeper->note(kept);
}

// Whether a saved tensor is an activation, whose size follows that of the batch: it has a history other than views and
// casts of one leaf, which is a weight or its copy, and enough floating-point numbers of its own.
bool is_activation(const at::Tensor &saved);

// Whether a saved tensor is a part of an activation, of which it has few numbers: as it is, it would keep the memory of
// all of it.
bool is_small_part(const at::Tensor &saved);

// Whether a tensor is made from a trained leaf by views and casts alone.
bool is_of_leaf(const at::Tensor &t);

// Keep activations in fewer bits, or in the memory of the host.
std::shared_ptr<Keeper> keeper_in_half();
std::shared_ptr<Keeper> keeper_in_fp8_rows();
std::shared_ptr<Keeper> keeper_on_host();

}  // namespace tamp

struct tamp_saved_tensors {
  std::shared_ptr<tamp::Keeper> keeper;
};
