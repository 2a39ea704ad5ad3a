//! The statistics of batch normalization for averaged weights.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use crate::average::{AveragedWeights, SwappedIn};
use crate::error::{Error, Result, ensure};
use crate::ffi::OutsideRegions;
use crate::variables::Variable;

impl AveragedWeights {
    /// Computes the statistics of batch normalization for the averages: the mean over `batches` of each batch's own.
    /// Those of the model belong to its last weights and do not fit the averages. They are swapped in with the averages
    /// from then on, and the model keeps its own. The counterpart of `torch.optim.swa_utils.update_bn`.
    ///
    /// `forward` runs the model on a batch as in training, such as `|xs| net.forward_t(&xs, true)`, without gradients.
    /// `momentum` is that of the model's layers, 0.1 unless their configuration has another; it must not be 0. Layers
    /// are found by the names of their variables, `running_mean` and `running_var`. A model without them is left alone,
    /// and so are statistics that are averaged themselves, with `use_buffers`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a momentum outside its range, and without batches; the error of `forward`; the
    /// same as [`swap_in`](Self::swap_in). The statistics are then as before.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::nn::{self, ModuleT};
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::average::Swa;
    ///
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let norm = nn::batch_norm1d(vs.root() / "norm", 2, Default::default());
    /// let mut swa = Swa::default().build(&vs)?;
    /// swa.advance()?;
    /// let batches = [1.0, 5.0].map(|mean| Tensor::full([8, 2], mean, (Kind::Float, Device::Cpu)));
    /// swa.update_batch_norm(0.1, &batches, |xs| Ok(norm.forward_t(xs, true)))?;
    ///
    /// let mean = || vs.variables()["norm.running_mean"].double_value(&[0]);
    /// assert_eq!(mean(), 0.0);
    /// let _swapped = swa.swap_in()?;
    /// assert!((mean() - 3.0).abs() < 1e-5);
    /// # Ok::<(), tch_amp::Error>(())
    /// ```
    pub fn update_batch_norm<B>(
        &mut self,
        momentum: f64,
        batches: impl IntoIterator<Item = B>,
        mut forward: impl FnMut(B) -> Result<Tensor>,
    ) -> Result<()> {
        let holds = momentum > 0.0 && momentum <= 1.0;
        ensure("momentum", momentum, holds, "more than 0 and at most 1")?;
        if self.statistics.buffers.is_empty() {
            return Ok(());
        }
        // The layers write to these instead of the model's own.
        let running = zeros(&self.statistics.buffers)?;
        let means = {
            let _swapped = SwappedIn::new(self, Some(&running))?;
            let _no_grad = tch::no_grad_guard();
            means(&running, momentum, batches, &mut forward)?
        };
        self.statistics.averaged = means;
        Ok(())
    }
}

fn zeros(buffers: &BTreeMap<String, Variable>) -> Result<BTreeMap<String, Tensor>> {
    let _own = OutsideRegions::enter();
    let zeros =
        |(name, buffer): (&String, &Variable)| Ok((name.clone(), buffer.tensor.f_zeros_like()?));
    buffers.iter().map(zeros).collect()
}

/// Adds statistics to their sums.
fn add(sums: &mut BTreeMap<String, Tensor>, statistics: &BTreeMap<String, Tensor>) -> Result<()> {
    let _own = OutsideRegions::enter();
    for (name, statistic) in statistics {
        let term = statistic.f_to_kind(Kind::Double)?;
        let sum = match sums.remove(name) {
            Some(sum) => term.f_add(&sum)?,
            None => term,
        };
        sums.insert(name.clone(), sum);
    }
    Ok(())
}

/// The means over the batches of the statistics that each one adds to running ones, which are zero before it.
fn means<B>(
    running: &BTreeMap<String, Tensor>,
    momentum: f64,
    batches: impl IntoIterator<Item = B>,
    forward: &mut impl FnMut(B) -> Result<Tensor>,
) -> Result<BTreeMap<String, Tensor>> {
    let mut sums = BTreeMap::new();
    let mut count = 0.0;
    for batch in batches {
        for statistic in running.values() {
            let _zeroed = statistic.shallow_clone().f_zero_()?;
        }
        drop(forward(batch)?);
        count += 1.0;
        add(&mut sums, running)?;
    }
    if count == 0.0 {
        let problem = "has no batch; the statistics need at least one".to_owned();
        return Err(Error::InvalidArgument { name: "batches", problem });
    }
    let _own = OutsideRegions::enter();
    // A batch adds `momentum` times its statistics.
    let mean = |(name, sum): (String, Tensor)| {
        let kind = running[&name].kind();
        Ok((name, sum.f_mul(&Tensor::from(1.0 / (count * momentum)))?.f_to_kind(kind)?))
    };
    sums.into_iter().map(mean).collect()
}
