//! A window and its gradients, for a checkpoint between two micro-batches.

use std::fmt;

use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use crate::accumulation::Accumulation;
use crate::accumulation::dropping::Kept;
use crate::accumulation::window::check;
use crate::checkpoint::{Prepared, SaveState, SavedState, Stateful};
use crate::error::{Result, ensure};
use crate::ffi;
use crate::gradients::Taken;
use crate::variables::{Variable, each_once};

/// The name of what is not a gradient.
const WINDOW: &str = "window";

/// A window of micro-batches and the gradients that it has accumulated, which a checkpoint saves and restores.
#[derive(Debug)]
struct WithGradients<'w> {
    window: &'w mut Accumulation,
    named: Vec<(String, Tensor)>,
}

/// Where a window is.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct WindowState {
    shares: Vec<f64>,
    taken: usize,
    /// Whether each of the micro-batches was left out; empty if the window leaves none out.
    dropped: Vec<bool>,
}

/// A window and its gradients that have been loaded.
#[derive(Debug)]
struct Loaded {
    window: Accumulation,
    gradients: Vec<Option<Tensor>>,
}

impl Accumulation {
    /// Pairs the window with the gradients of these named parameters, so that a checkpoint can be saved between two
    /// micro-batches. The resumed run goes on with the micro-batch whose index is [`taken`](Self::taken). PyTorch has
    /// no counterpart.
    ///
    /// A checkpoint without it must be saved between two windows. Pass all parameters that the backward passes reach;
    /// variables without gradients may be among them. Resume with the same optimizer: a gradient that
    /// [`accumulate_in_f32`](crate::optim::Optimizer::accumulate_in_f32) has made f32 is restored in f32.
    ///
    /// Under `DistributedDataParallel`, each rank has gradients of its own until the window is complete, so each rank
    /// needs a file of its own.
    ///
    /// # Examples
    ///
    /// ```
    /// use tch::nn::{self, Module};
    /// use tch::{Device, Kind, Tensor};
    /// use tch_amp::GradScaler;
    /// use tch_amp::accumulation::Accumulation;
    /// use tch_amp::checkpoint::Checkpoint;
    ///
    /// # let name = format!("tch-amp-doc-window-{}.safetensors", std::process::id());
    /// # let path = std::env::temp_dir().join(name);
    /// let vs = nn::VarStore::new(Device::Cpu);
    /// let net = nn::linear(vs.root(), 4, 1, Default::default());
    /// let mut scaler = GradScaler::new(Device::Cpu)?;
    /// let mut window = Accumulation::of_equal(4)?;
    /// let xs = Tensor::ones([8, 4], (Kind::Float, Device::Cpu));
    /// window.backward(&mut scaler, &net.forward(&xs).mean(Kind::Float))?;
    ///
    /// let mut checkpoint = Checkpoint::new();
    /// checkpoint.add("model", &vs)?;
    /// checkpoint.add("scaler", &mut scaler)?;
    /// checkpoint.add("window", window.with_gradients(vs.variables()))?;
    /// checkpoint.save(&path)?;
    ///
    /// // Any window will do: its weights are replaced.
    /// let mut resumed = Accumulation::of_equal(1)?;
    /// # vs.trainable_variables().iter_mut().for_each(Tensor::zero_grad);
    /// Checkpoint::load(&path)?
    ///     .restore()
    ///     .add("model", &vs)
    ///     .add("scaler", &mut scaler)
    ///     .add("window", resumed.with_gradients(vs.variables()))
    ///     .apply()?;
    /// assert_eq!((resumed.taken(), resumed.micro_batches()), (1, 4));
    /// # std::fs::remove_file(&path)?;
    /// # assert_eq!(net.bs.as_ref().map(|bias| bias.grad()), Some(Tensor::from_slice(&[16384f32])));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn with_gradients(
        &mut self,
        parameters: impl IntoIterator<Item = (String, Tensor)>,
    ) -> impl Stateful + fmt::Debug {
        WithGradients { window: self, named: parameters.into_iter().collect() }
    }
}

impl WithGradients<'_> {
    /// The parameters, each once: a gradient must not be restored several times.
    fn parameters(&self) -> Result<Vec<Variable>> {
        each_once(self.named.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())))
    }

    /// Where the window is. Synchronizes if micro-batches may have been left out.
    fn state(&self) -> Result<WindowState> {
        let Accumulation { shares, next, kept } = &*self.window;
        Ok(WindowState { shares: shares.clone(), taken: *next, dropped: kept.answers()? })
    }

    /// Replaces the window and the gradients. On failure both are as before.
    fn resume(&mut self, loaded: Loaded) -> Result<()> {
        let parameters: Vec<_> =
            self.parameters()?.into_iter().map(|variable| variable.tensor).collect();
        let earlier = Taken::from(parameters)?;
        ffi::gradients_add(earlier.parameters(), &loaded.gradients)?;
        earlier.settle();
        *self.window = loaded.window;
        Ok(())
    }
}

impl Loaded {
    /// Checks what was loaded. The gradients are in the order of the parameters.
    fn new(state: WindowState, gradients: Vec<Option<Tensor>>) -> Result<Self> {
        let WindowState { shares, taken, dropped } = state;
        check(&shares)?;
        let all = shares.len();
        ensure(
            "the saved `taken`",
            taken as f64,
            taken <= all,
            "at most the number of micro-batches",
        )?;
        let known = dropped.len();
        let holds = known == 0 || known == taken;
        ensure(
            "the number of saved `dropped`",
            known as f64,
            holds,
            "that of the micro-batches taken",
        )?;
        let kept = Kept::resumed(shares.iter().copied().zip(dropped))?;
        Ok(Self { window: Accumulation { shares, next: taken, kept }, gradients })
    }
}

impl Stateful for WithGradients<'_> {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.value(WINDOW, &self.state()?)?;
        for Variable { names, tensor } in self.parameters()? {
            let gradient = tensor.f_grad()?;
            if gradient.defined() {
                state.tensors(names.iter().map(|name| (name, &gradient)))?;
            }
        }
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let (mut gradients, mut targets) = (Vec::new(), Vec::new());
        for Variable { names, tensor } in self.parameters()? {
            let kinds: Vec<_> = names.iter().map(|name| saved.kind(name)).collect::<Result<_>>()?;
            let Some(kind) = kinds.into_iter().flatten().next() else {
                gradients.push(None);
                continue;
            };
            let is_skipped = names.iter().any(|name| saved.skips(name));
            // One that is skipped is not copied, and needs no memory.
            let to = if is_skipped { tensor } else { empty(&tensor, kind)? };
            gradients.push((!is_skipped).then(|| to.shallow_clone()));
            targets.extend(names.iter().map(|name| (name.clone(), to.shallow_clone())));
        }
        let pairs = targets.iter().map(|(name, to)| (name, to));
        let copies = saved.copy(pairs, "in the model")?;
        let loaded = Loaded::new(saved.value(WINDOW)?, gradients)?;
        Ok(copies.and(Prepared::step(move || self.resume(loaded))))
    }
}

/// Returns memory for a gradient that was saved in a dtype. It is the parameter's, except for the f32 gradients that
/// parameters in half precision can have.
fn empty(parameter: &Tensor, saved: Kind) -> Result<Tensor> {
    let kind = match (parameter.f_kind()?, saved) {
        (Kind::Half | Kind::BFloat16, Kind::Float) => Kind::Float,
        (kind, _) => kind,
    };
    let size = ffi::sizes(parameter)?;
    Ok(Tensor::f_empty(size, (kind, parameter.device()))?)
}
