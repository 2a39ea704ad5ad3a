//! How the tensors are kept that autograd saves for the backward pass.

use crate::capture;
use crate::error::{Error, Result};
use crate::ffi::{self, SavedForm};

/// Keeps what autograd saves for the backward pass in fewer bits, or in the memory of the host, without a change to the
/// model. What autograd saves is often the largest part of an iteration's memory.
///
/// Call [`run`](Self::run) with the forward pass. The results of the forward pass do not change: only gradients do, by
/// what a saved tensor has lost. The backward pass may run later and on any thread. Of what a thread saves in
/// [`run`](Self::run), these are kept as they are:
///
/// - tensors without a history, such as weights, inputs, masks, indices and the statistics of normalizations,
/// - views and casts of weights, such as those that autocast caches,
/// - tensors with fewer than 4096 numbers, of integers, of f64 (except by [`on_host`](Self::on_host)), and sparse,
///   nested and expanded ones,
/// - results of `log_softmax` and `logsumexp`, whose exponentials a derivative takes,
/// - what the nodes of this crate keep by themselves, such as the logits of
///   [`linear_cross_entropy`](crate::lean::linear_cross_entropy).
///
/// Some derivatives need their saved tensors exactly: those that compare a saved tensor with a saved result (of `amax`,
/// `amin`, `max`, `min`, `median` and the infinity norm of all numbers), and those that take exponentials or
/// reciprocals of saved numbers (of `logsumexp`, `log`, `asin` and division). Compute them in a region of
/// [`unchanged`](Self::unchanged).
///
/// A tensor that several operators save is kept once, whichever views of all of it they save. Of a small part of an
/// activation, with fewer than 4096 numbers, a copy is kept, because the part itself would keep the memory of the whole
/// activation. As without a region, the backward pass fails if a saved tensor was changed in place. A change through
/// `data()` goes unnoticed, with a region or without: an operator that saves the tensor afterwards may then share the
/// copy that was kept before the change.
///
/// The saved tensors of custom functions are kept in the same way. A part of the model that is
/// [recomputed](crate::recompute) has exact gradients: its inputs are kept bit by bit, and everything else is computed
/// again.
///
/// Regions may be nested, and only the innermost one applies, as with PyTorch's hooks. Inside a captured
/// [graph](crate::graph) only [`on_host`](Self::on_host) is refused. On CUDA, all forms have run on simulated GPUs
/// only, and on no real one.
///
/// The counterpart of `torch.autograd.graph.saved_tensors_hooks` with functions that pack and unpack. libtorch asks its
/// autograd engine for these hooks. The first call of [`run`](Self::run), of
/// [`checkpointed`](crate::recompute::checkpointed), of `insight::saved_tensors` or of `insight::audit` in a process
/// therefore replaces the engine with one of this crate, which runs backward passes like libtorch's own. A backward
/// pass that is running at that moment ends in libtorch's engine. A program that calls none of these keeps libtorch's
/// engine.
///
/// # Examples
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::autocast;
/// use tch_amp::memory::SavedTensors;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let net = nn::seq()
///     .add(nn::linear(vs.root() / "up", 64, 256, Default::default()))
///     .add_fn(|xs| xs.gelu("none"))
///     .add(nn::linear(vs.root() / "down", 256, 1, Default::default()));
/// let xs = Tensor::randn([128, 64], (Kind::Float, Device::Cpu));
/// let loss = SavedTensors::fp8_rows()
///     .try_run(|| autocast(Device::Cpu, || net.forward(&xs).square().mean(Kind::Float)))?;
/// loss.backward();
/// assert!(vs.trainable_variables().iter().all(|w| w.grad().defined()));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "only `run` keeps tensors in this form"]
pub struct SavedTensors {
    form: SavedForm,
}

impl SavedTensors {
    /// Keeps f32 activations in bf16: in 2 bytes instead of 4. Their gradients change by as much as bf16 rounds, as
    /// everywhere in autocast. In a small GPT and a small BERT under autocast, 0.89 and 0.88 times as many bytes were
    /// kept as by autograd, and the error of the gradients beside f32 stayed that of autocast.
    pub fn half() -> Self {
        Self { form: SavedForm::Half }
    }

    /// Keeps activations in f32, bf16 and fp16 in one byte, as e4m3 numbers with an f32 factor for each row. A row is
    /// the last dimension, or the last ones together if that has fewer than 32 numbers. The factor is a power of two
    /// that brings the largest number of the row to at most 448, so that none overflows. Each number is kept within
    /// 1/16 of its size, or 2^-16 of the largest in its row, and none but 0 becomes 0. An infinity stays one, and a NaN
    /// makes its row NaN.
    ///
    /// In a small GPT and a small BERT under autocast, 0.46 and 0.45 times as many bytes were kept as by autograd. The
    /// error of the gradients beside f32 was 4 to 9 times that of autocast alone: 2 to 3 % with weights as PyTorch
    /// draws them, and 3 to 7 % with tch's, which are larger; `docs/measurements/cpu.md` in the repository has the
    /// tables. Compare a short run with and without it before you start a long one.
    ///
    /// Source: Xi et al., *COAT: Compressing Optimizer states and Activation for Memory-Efficient FP8 Training*,
    /// <https://arxiv.org/abs/2410.19313>.
    pub fn fp8_rows() -> Self {
        Self { form: SavedForm::Fp8Rows }
    }

    /// Moves activations on a CUDA device to pinned memory of the host. They are copied on a stream of their own. Each
    /// one that the backward pass asks for brings back, ahead of time, the one that was saved before it. Nothing
    /// synchronizes, and no bit changes. On other devices tensors are kept as they are.
    ///
    /// Has run on simulated GPUs only: how much time it takes on a real one is not measured.
    ///
    /// The counterpart of `torch.autograd.graph.save_on_cpu(pin_memory=True)`, which copies on the stream of the
    /// computation, and copies a tensor as often as it is saved.
    pub fn on_host() -> Self {
        Self { form: SavedForm::OnHost }
    }

    /// Keeps tensors as they are, for a part of another region whose gradients need every bit.
    pub fn unchanged() -> Self {
        Self { form: SavedForm::AsGiven }
    }

    /// Runs `f`, and keeps what autograd saves on this thread meanwhile in this form. If `f` starts a backward pass
    /// with `create_graph`, what that pass saves is kept in this form as well, on whichever thread it runs.
    ///
    /// # Errors
    ///
    /// [`Error::OtherEngine`] if something else has replaced autograd's engine, [`Error::Capture`] for
    /// [`on_host`](Self::on_host) in an iteration of a graph, and [`Error::Torch`] if memory runs out; `f` is not run
    /// then. If memory runs out later, while a tensor is saved, the operator that saves it fails.
    pub fn run<T>(self, f: impl FnOnce() -> T) -> Result<T> {
        if self.form == SavedForm::OnHost {
            let remedy = "use `SavedTensors::half` or `fp8_rows`, whose copies stay on the device";
            capture::refuse("`SavedTensors::on_host`, which copies to the host", remedy)?;
        }
        ffi::SavedTensors::new(self.form)?.during(f)
    }

    /// Runs a closure that can fail like [`run`](Self::run), and returns its error or that of the region.
    ///
    /// # Errors
    ///
    /// The error of `f`, and the same as [`run`](Self::run).
    pub fn try_run<T, E: From<Error>>(
        self,
        f: impl FnOnce() -> std::result::Result<T, E>,
    ) -> std::result::Result<T, E> {
        self.run(f)?
    }
}
