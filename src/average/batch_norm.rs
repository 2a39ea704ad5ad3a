//! The statistics of batch normalization for averaged weights.

use std::collections::BTreeMap;

use tch::{Kind, Tensor};

use crate::average::averaged::RUNNING_VAR;
use crate::average::{AveragedWeights, SwappedIn};
use crate::error::{Error, Result, ensure};
use crate::ffi::{self, Calls, OutsideRegions, StatisticsPass};
use crate::variables::Variable;

/// The value of a statistic before a batch unless its calls are counted. It is lost in rounding when a layer adds to
/// it, and stays as it is if none does.
const UNTOUCHED: f64 = 1e-30;

impl AveragedWeights {
    /// Computes the statistics of batch normalization for the averages: for each layer the mean of those of all its
    /// calls, as if it were new. Those of the model belong to its last weights and do not fit the averages. They are
    /// swapped in with the averages from then on, and the model keeps its own. The counterpart of
    /// `torch.optim.swa_utils.update_bn`, whose numbers it has.
    ///
    /// `forward` runs the model on a batch as in training, such as `|xs| net.forward_t(&xs, true)`, without gradients,
    /// on this thread. Layers are found by the names of their variables, `running_mean` and `running_var`, and their
    /// calls are counted whatever their momentum; a variable `num_batches_tracked` beside them, in i64, gets that
    /// count. As in PyTorch, a layer that is not called in training has mean 0 and variance 1, and instance
    /// normalization goes on from the model's statistics with its own momentum. A model without such variables is left
    /// alone, and so are statistics that are averaged themselves, with `use_buffers`.
    ///
    /// `momentum` matters for layers that update their statistics without an operator of libtorch or
    /// [`SyncBatchNorm`](crate::distributed::SyncBatchNorm) only: it is theirs, must not be 0, and they must run at
    /// most once for each batch.
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
        let mut running = Running::new(&self.statistics.buffers, momentum)?;
        let pass = running.count(&self.statistics.buffers)?;
        let mut is_empty = true;
        {
            let _swapped = SwappedIn::new(self, Some(&running.tensors))?;
            let _no_grad = tch::no_grad_guard();
            for batch in batches {
                is_empty = false;
                running.begin_batch(&pass)?;
                drop(forward(batch)?);
                running.end_batch(&pass)?;
            }
        }
        if is_empty {
            let problem = "has no batch; the statistics need at least one".to_owned();
            return Err(Error::InvalidArgument { name: "batches", problem });
        }
        self.statistics.averaged = running.finish(&self.statistics.buffers, &pass)?;
        Ok(())
    }
}

/// The variables to which the layers write during a pass over batches instead of the model's own.
struct Running {
    tensors: BTreeMap<String, Tensor>,
    /// The statistics among them, in their order in the pass.
    statistics: Vec<Statistic>,
    momentum: f64,
}

/// A running statistic.
struct Statistic {
    name: String,
    running: Tensor,
    initial: f64,
    /// For one that its layer updates by arithmetic of its own: the sum of what each batch has made of it, in f64, and
    /// how many batches have reached it.
    sums: Option<[Tensor; 2]>,
}

impl Running {
    fn new(buffers: &BTreeMap<String, Variable>, momentum: f64) -> Result<Self> {
        let _own = OutsideRegions::enter();
        let zeros = |(name, buffer): (&String, &Variable)| {
            Ok((name.clone(), buffer.tensor.f_zeros_like()?))
        };
        let tensors = buffers.iter().map(zeros).collect::<Result<BTreeMap<_, _>>>()?;
        let statistic = |(name, running): (&String, &Tensor)| {
            let is_variance = buffers[name].names.iter().any(|name| name.ends_with(RUNNING_VAR));
            let (name, running) = (name.clone(), running.shallow_clone());
            Statistic { name, running, initial: is_variance.into(), sums: None }
        };
        let floating = tensors.iter().filter(|(_, tensor)| tensor.kind() != Kind::Int64);
        let statistics = floating.map(statistic).collect();
        Ok(Self { tensors, statistics, momentum })
    }

    /// Begins to count the calls of the layers. Must be called while the model has its own statistics.
    fn count(&self, buffers: &BTreeMap<String, Variable>) -> Result<StatisticsPass> {
        let own = self.statistics.iter().map(|statistic| {
            // Another handle of the same memory, which the swap leaves alone.
            Ok(buffers[&statistic.name].tensor.f_data()?)
        });
        let own = own.collect::<Result<Vec<_>>>()?;
        let running: Vec<_> =
            self.statistics.iter().map(|statistic| statistic.running.shallow_clone()).collect();
        let variances: Vec<_> =
            self.statistics.iter().map(|statistic| statistic.initial == 1.0).collect();
        StatisticsPass::begin(&running, &own, &variances)
    }

    /// The statistics that no counted call has reached so far.
    fn never_met<'a>(
        &'a mut self,
        pass: &'a StatisticsPass,
    ) -> impl Iterator<Item = &'a mut Statistic> {
        let places = self.statistics.iter_mut().enumerate();
        places.filter(|(place, _)| pass.calls(*place) == Calls::NeverMet).map(|found| found.1)
    }

    fn begin_batch(&mut self, pass: &StatisticsPass) -> Result<()> {
        let _own = OutsideRegions::enter();
        for statistic in self.never_met(pass) {
            statistic.running.f_copy_(&number(UNTOUCHED, &statistic.running)?)?;
        }
        Ok(())
    }

    fn end_batch(&mut self, pass: &StatisticsPass) -> Result<()> {
        let _own = OutsideRegions::enter();
        for Statistic { running, sums, .. } in self.never_met(pass) {
            let batch = running.f_to_kind(Kind::Double)?;
            let untouched = number(UNTOUCHED, running)?;
            let reached = running.f_ne_tensor(&untouched)?.f_any()?.f_to_kind(Kind::Double)?;
            *sums = Some(match sums.take() {
                Some([sum, count]) => [sum.f_add(&batch)?, count.f_add(&reached)?],
                None => [batch, reached],
            });
        }
        Ok(())
    }

    /// The statistics of the averages.
    fn finish(
        mut self,
        buffers: &BTreeMap<String, Variable>,
        pass: &StatisticsPass,
    ) -> Result<BTreeMap<String, Tensor>> {
        let _own = OutsideRegions::enter();
        let momentum = self.momentum;
        for statistic in self.never_met(pass) {
            let Some([sum, count]) = statistic.sums.take() else { continue };
            // A batch adds `momentum` times its statistics.
            let mean = sum.f_div(&count.f_mul(&Tensor::from(momentum))?)?;
            let is_reached = count.f_ne_tensor(&number(0.0, &count)?)?;
            let mean = mean.f_where_self(&is_reached, &number(statistic.initial, &sum)?)?;
            statistic.running.f_copy_(&mean)?;
        }
        let calls: Vec<_> = (0..self.statistics.len()).map(|place| pass.calls(place)).collect();
        for (name, Variable { names, tensor }) in buffers {
            if tensor.kind() != Kind::Int64 {
                continue;
            }
            let of_layer = self.statistics.iter().zip(&calls).find(|(statistic, _)| {
                let theirs = &buffers[&statistic.name].names;
                names.iter().any(|name| theirs.iter().any(|other| are_of_one_layer(name, other)))
            });
            match (of_layer, self.tensors.get_mut(name)) {
                (Some((_, &Calls::Averaged(calls))), Some(count)) => {
                    count.f_copy_(&ffi::number_new(calls as f64, Kind::Double, count.device())?)?;
                }
                // The layer, if there is one, has counted by itself.
                (Some((_, Calls::NeverMet)), _) => {}
                _ => drop(self.tensors.remove(name)),
            }
        }
        Ok(self.tensors)
    }
}

/// A number in the dtype and on the device of a tensor.
fn number(value: f64, like: &Tensor) -> Result<Tensor> {
    ffi::number_new(value, like.f_kind()?, like.device())
}

/// Returns whether two variables belong to the same layer.
fn are_of_one_layer(one: &str, other: &str) -> bool {
    let layer = |name: &str| name.rsplit_once('.').map(|(layer, _)| layer.to_owned());
    layer(one) == layer(other)
}
