//! TorchScript modules under autocast: TorchScript's own autocast pass, and freezing. tch runs such modules as
//! `tch::CModule`. The feature `jit` adds this module.
//!
//! PyTorch has deprecated TorchScript in favour of `torch.export`: from 2.11 on, `torch.jit.trace` and
//! `torch.jit.script` in Python warn of that. The packages that AOTInductor compiles from a `torch.export` run in Python
//! and C++, and tch has no call for them. For programs in Rust a TorchScript file is still the way to run a model
//! without its code. The recipe [`inference`](crate::guide::recipes#inference) traces one in a region.

use crate::error::Result;
use crate::ffi;

/// Turns TorchScript's own autocast pass on or off for the whole process, and returns whether it was on. It is on at
/// first. The counterpart of `torch._C._jit_set_autocast_mode`.
///
/// While it is on, TorchScript compiles the casts of the region into a module that is called in one. These casts are
/// not cached, and operators that the region [keeps in f32](crate::Autocast::keep_in_f32) do not get f32 inputs.
/// While it is off, operators in a module are cast as they are anywhere else. Switch it off before the first call of a
/// module, because what was compiled stays. It makes no difference to a module that is called outside of all regions.
///
/// # Errors
///
/// [`Error::Torch`](crate::Error::Torch) if libtorch fails.
///
/// # Examples
///
/// ```
/// use tch_amp::jit;
///
/// let was_on = jit::set_autocast_mode(false)?;
/// assert!(was_on);
/// assert!(!jit::set_autocast_mode(was_on)?);
/// # Ok::<(), tch_amp::Error>(())
/// ```
pub fn set_autocast_mode(enabled: bool) -> Result<bool> {
    ffi::jit_set_autocast_mode(enabled)
}

/// Makes the parameters, buffers and attributes of a TorchScript module constants of its `forward`, and optimizes
/// `forward` for them. Takes the content of a file that `tch::CModule::save` or `torch.jit.save` has written, and
/// returns that of a new one, which `tch::CModule::load_data` and `torch.jit.load` read. The counterpart of
/// `torch.jit.freeze`.
///
/// A frozen module has no parameters, cannot be trained, and has no other methods than `forward`. Tracing in tch makes
/// the weights constants already. Products of constants are computed in their own dtypes, also while a region is open;
/// in PyTorch they are then computed in the region's dtype.
///
/// Loading runs code that is in the file: freeze only files that you trust.
///
/// # Errors
///
/// [`Error::Torch`](crate::Error::Torch) for bytes that are no TorchScript file, for one of a device that this process
/// does not have, and for a module in training mode, which `tch::CModule::set_eval` ends.
///
/// # Examples
///
/// ```no_run
/// use tch::CModule;
/// use tch_amp::jit;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let frozen = jit::freeze(&std::fs::read("model.pt")?)?;
/// let module = CModule::load_data(&mut frozen.as_slice())?;
/// assert!(module.named_parameters()?.is_empty());
/// std::fs::write("frozen.pt", frozen)?;
/// # Ok(())
/// # }
/// ```
pub fn freeze(file: &[u8]) -> Result<Vec<u8>> {
    Ok(Vec::try_from(ffi::jit_freeze(file)?)?)
}
