//! A report of the memory that the state of an optimizer takes.

use std::fmt;

use tch::{Kind, Tensor};

#[cfg(doc)]
use crate::error::Error;
use crate::error::Result;
use crate::ffi::{self, KeptAs, OutsideRegions};
use crate::optim::Optimizer;

/// The memory of an optimizer's state, by [`Optimizer::state_report`]; `Display` prints it as one line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StateReport {
    /// The elements of the parameters that have a state here.
    pub elements: u64,
    /// The bytes of the moments, or of what other algorithms keep in their place.
    pub moment_bytes: u64,
    /// The bytes of the master weights or their remainders.
    pub master_bytes: u64,
    /// The elements whose moments are in 8 bits.
    pub in_eight_bits: u64,
    /// Those of them whose second moment is stored as the lowest value of their block's window, about 2^-31 of the
    /// block's largest. If the exact one is smaller, the updates are too small. Elements that never had a gradient, such
    /// as unused rows of an embedding, are counted, too, and lose nothing.
    pub below_window: u64,
}

impl fmt::Display for StateReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { elements, moment_bytes, master_bytes, in_eight_bits, below_window } = *self;
        let each = |bytes: u64| bytes as f64 / elements.max(1) as f64;
        write!(
            f,
            "{elements} elements: moments {moment_bytes} bytes, {:.2} each; master weights {master_bytes} bytes, {:.2} \
             each",
            each(moment_bytes),
            each(master_bytes)
        )?;
        if in_eight_bits > 0 {
            let share = 100.0 * below_window as f64 / in_eight_bits as f64;
            write!(
                f,
                "; {share:.3} % of the 8-bit second moments are at the bottom of their window"
            )?;
        }
        Ok(())
    }
}

impl Optimizer {
    /// Reports how many bytes the optimizer's state takes, and how many 8-bit second moments are at the bottom of their
    /// block's window. Parameters that were not stepped yet are not counted, nor are step counts. If the state is divided
    /// among ranks, the report is of this rank. Synchronizes once for each parameter with 8-bit moments. PyTorch has no
    /// counterpart.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if libtorch fails.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::{Kind, Tensor};
    /// use tch_amp::optim::{AdamW, States};
    ///
    /// let w = Tensor::ones([64, 64], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
    /// let mut opt = AdamW::default().states(States::EightBit).build(&[w.shallow_clone()], 1e-3)?;
    /// opt.backward_step(&w.sum(Kind::Float))?;
    /// let report = opt.state_report()?;
    /// assert_eq!(report.moment_bytes, 64 * 64 * 2 + 64 * 64 / 32);
    /// assert_eq!(report.below_window, 0);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn state_report(&self) -> Result<StateReport> {
        let _own = OutsideRegions::enter();
        let bytes = |tensor: &Tensor| {
            (ffi::numel(tensor).saturating_mul(tensor.kind().elt_size_in_bytes())) as u64
        };
        let mut report = StateReport::default();
        for (slot, parameter) in self.slots.iter().zip(&self.parameters) {
            let kept: Vec<_> = slot.state.tensors.iter().flatten().collect();
            if kept.is_empty() && slot.state.master.is_none() {
                continue;
            }
            let elements = ffi::numel(parameter) as u64;
            report.elements += elements;
            report.moment_bytes += kept.iter().map(|tensor| bytes(tensor)).sum::<u64>();
            report.master_bytes += slot.state.master.as_ref().map_or(0, bytes);
            if let (KeptAs::EightBit, [_, exp_avg_sq, _]) = (self.states.of(parameter), &kept[..]) {
                let lowest = exp_avg_sq.f_logical_not()?.f_sum(Kind::Int64)?.f_int64_value(&[])?;
                report.in_eight_bits += elements;
                report.below_window += lowest.unsigned_abs();
            }
        }
        Ok(report)
    }
}
