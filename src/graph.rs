//! Iterations that are captured once as a CUDA graph, and replayed by one launch.
//!
//! An iteration of a small model gives a GPU hundreds of short kernels, and the host takes longer to launch them than
//! the device to run them. A graph is launched as a whole. What it repeats is what the device was given to do, so a
//! number of the host, such as a learning rate, would stand still in it. The optimizers, the scaler, averages and
//! detectors of spikes of this crate keep theirs on the device, and what would stand still or wait is refused.
//!
//! The guide's page on [graphs](crate::guide::graphs) says what an iteration may do.
//!
//! # Examples
//!
//! ```
//! use tch::{Device, Kind, Tensor, nn};
//! use tch_amp::graph::Captured;
//! use tch_amp::{Amp, optim};
//!
//! let device = Device::cuda_if_available();
//! let amp = Amp::Fp16.on(device)?;
//! let vs = nn::VarStore::new(device);
//! let net = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut opt = optim::AdamW::default().build(&vs, 1e-3)?;
//! let mut scaler = amp.scaler()?;
//! let mut xs = Tensor::zeros([8, 4], (Kind::Float, device)); // every batch is copied into it
//! let mut graph = Captured::new(device)?;
//! for _ in 0..6 {
//!     xs.copy_(&Tensor::randn([8, 4], (Kind::Float, device)));
//!     let iteration = graph.replay(|| {
//!         let loss = amp.autocast(|| xs.apply(&net).square().mean(Kind::Float))?;
//!         scaler.backward_step(&mut opt, &loss)?;
//!         Ok(loss.detach())
//!     })?;
//!     println!("{:.3}", iteration.output().double_value(&[]));
//! }
//! # Ok::<(), tch_amp::Error>(())
//! ```

use std::panic::Location;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::{Device, Tensor};

use crate::autocast::{clear_autocast_cache, is_autocast_enabled};
use crate::capture::{self, Ended, Member, Phase};
use crate::device::check_usable;
use crate::error::{Error, Result};
use crate::ffi::Graph;
use crate::scaler::{Answer, StepOutcome, noted};

/// An iteration of a training that a CUDA device replays as a graph. The counterpart of `torch.cuda.CUDAGraph` with
/// `torch.cuda.graph`.
///
/// The first calls of [`replay`](Self::replay) run the iteration as it is, the next one captures it, and from then on
/// each launches the graph: each call is one iteration of the training. On the CPU every call runs it, so that a
/// program is the same everywhere. Dropping it synchronizes if the steps read host memory that it keeps: with
/// stochastic rounding or low-bit moments.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::graph::Captured;
/// use tch_amp::{Amp, GradScaler, autocast, optim};
///
/// let device = Device::cuda_if_available();
/// let vs = nn::VarStore::new(device);
/// let net = nn::linear(vs.root(), 4, 1, Default::default());
/// let mut opt = optim::AdamW::default().build(&vs, 1e-3)?;
/// let mut scaler = GradScaler::new(device)?;
/// // A graph reads the same memory each time: every batch is copied into it.
/// let mut xs = Tensor::zeros([8, 4], (Kind::Float, device));
/// let mut graph = Captured::new(device)?;
/// for step in 0..10 {
///     xs.copy_(&Tensor::randn([8, 4], (Kind::Float, device)));
///     opt.set_lr(1e-3 / f64::from(step + 1))?;
///     let iteration = graph.replay(|| {
///         let loss = autocast(device, || xs.apply(&net).square().mean(Kind::Float))?;
///         scaler.backward_step(&mut opt, &loss)?;
///         Ok(loss.detach())
///     })?;
///     assert!(iteration.outcomes()?[0].is_stepped()?);
///     assert!(iteration.output().double_value(&[]) >= 0.0);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Captured<T> {
    device: Device,
    graph: Option<Graph>,
    stage: Stage,
    /// The parts of the iteration that was last run.
    members: Vec<Arc<dyn Member>>,
    /// How often they had changed then.
    changes: Vec<u64>,
    /// Tensors that the captured graph uses.
    kept: Vec<Tensor>,
    /// What counts its launches.
    counts: Vec<Arc<AtomicU64>>,
    latest: Option<Latest<T>>,
}

/// How many iterations run before the capture, at least: kernels are loaded and states made by them.
const WARM_UP: u32 = 3;

#[derive(Debug)]
enum Stage {
    WarmUp { iterations: u32 },
    Captured { at: &'static Location<'static> },
}

/// The result of the latest iteration, and its steps.
#[derive(Debug)]
struct Latest<T> {
    output: T,
    answers: Vec<Answer>,
}

/// An iteration that was run or replayed.
#[derive(Debug)]
pub struct Replay<'g, T> {
    iteration: &'g Latest<T>,
}

impl<T> Replay<'_, T> {
    /// Returns what the iteration has returned. Tensors in it are those of the capture, which every replay overwrites:
    /// copy what is to be kept. Reading a number from them synchronizes.
    pub fn output(&self) -> &T {
        &self.iteration.output
    }

    /// Returns the outcomes of the iteration's steps in their order, for counters and schedules. They stay those of
    /// this iteration. Launches a small copy for each; asking them later synchronizes only where
    /// [`StepOutcome`] says so.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the memory of the device does not suffice.
    pub fn outcomes(&self) -> Result<Vec<StepOutcome>> {
        self.iteration.answers.iter().map(StepOutcome::of).collect()
    }
}

impl<T> Captured<T> {
    /// Makes an empty graph for a device.
    ///
    /// # Errors
    ///
    /// [`Error::DeviceUnavailable`].
    pub fn new(device: Device) -> Result<Self> {
        check_usable(device)?;
        let graph = match device {
            Device::Cuda(index) => Some(Graph::new(index)?),
            _ => None,
        };
        let stage = Stage::WarmUp { iterations: 0 };
        let (members, changes) = (Vec::new(), Vec::new());
        let (kept, counts) = (Vec::new(), Vec::new());
        Ok(Self { device, graph, stage, members, changes, kept, counts, latest: None })
    }

    /// Takes one iteration of the training: runs `iteration`, captures and replays it, or replays it.
    ///
    /// At least three calls run the iteration, and further calls run it as long as it cannot be captured yet: until a
    /// first step has been taken if SGD has momentum, and once more after a change that replays do not follow, such as
    /// a write to weights that have master weights. Then it is captured, which synchronizes. From then on `iteration`
    /// is not called any more, and nothing that it does on the host happens: one launch repeats its work on the device,
    /// after a copy of the learning rates if they have changed. A replay does not synchronize, except for a
    /// [`Scheduler`](crate::schedule::Scheduler) in the iteration when the device is a thousand iterations late, or
    /// near the end of a schedule that ends.
    ///
    /// The iteration has to read its batch from the same tensors each time, drop the gradients by `zero_grad` or one of
    /// the `backward_step` calls, step the optimizer itself, and leave no window of an
    /// [`Accumulation`](crate::accumulation::Accumulation) open. Tensors that it reads, and that were made outside of
    /// it, have to live as long as the graph.
    ///
    /// # Errors
    ///
    /// [`Error::Capture`] if the iteration calls what a graph cannot hold, or if the call is in another place of the
    /// program than the one that was captured. [`Error::ChangedSinceCapture`] if something has changed that a replay
    /// does not follow: options other than learning rates, the scaler's options, a loaded state, weights with master
    /// weights that were changed from outside, or a part of the iteration, such as its optimizer, that was dropped. No
    /// replay has happened then. The error of the iteration, and [`Error::Torch`] if it cannot be captured. An
    /// iteration whose capture fails is lost, and its gradients are dropped; the next call runs one as it is.
    #[track_caller]
    pub fn replay(&mut self, iteration: impl FnOnce() -> Result<T>) -> Result<Replay<'_, T>> {
        let at = Location::caller();
        capture::refuse("another graph", "replay one graph after the other")?;
        if is_autocast_enabled(self.device) {
            let remedy =
                "open it in the iteration: casts that it keeps would stay those of the capture";
            return Err(capture::refusal("a region of autocast that is open already", remedy));
        }
        match &self.stage {
            Stage::Captured { at: captured } => {
                check_place(captured, at)?;
                self.check_changes()?;
                self.launch()?;
                self.members.iter().for_each(|member| member.link().note_replay());
            }
            Stage::WarmUp { iterations } if self.captures_next(*iterations) => {
                self.capture(iteration, at)?;
                self.launch()?;
            }
            Stage::WarmUp { iterations } => {
                let iterations = *iterations;
                self.run(iteration, iterations)?;
                self.stage = Stage::WarmUp { iterations: iterations.saturating_add(1) };
            }
        }
        let nothing = || Error::Torch("an iteration has left nothing".to_owned());
        Ok(Replay { iteration: self.latest.as_ref().ok_or_else(nothing)? })
    }

    /// Forgets the captured graph: the next call of [`replay`](Self::replay) runs the iteration, and the one after that
    /// captures it anew, also in another place of the program. The memory of the old graph is kept until then.
    pub fn recapture(&mut self) {
        let iterations = match self.stage {
            Stage::WarmUp { iterations } => iterations.min(WARM_UP - 1),
            Stage::Captured { .. } => WARM_UP - 1,
        };
        self.stage = Stage::WarmUp { iterations };
    }

    /// Returns whether the iteration is captured: never on the CPU.
    pub fn is_captured(&self) -> bool {
        matches!(self.stage, Stage::Captured { .. })
    }

    fn captures_next(&self, iterations: u32) -> bool {
        self.graph.is_some()
            && iterations >= WARM_UP
            && self.members.iter().all(|member| member.is_ready())
            && self.check_changes().is_ok()
    }

    /// Runs an iteration on the graph's stream, like any other.
    fn run(&mut self, iteration: impl FnOnce() -> Result<T>, before: u32) -> Result<()> {
        let phase = if before + 1 < WARM_UP { Phase::Eager } else { Phase::Settling };
        let stream = self.graph.as_ref().map(OnStream::enter).transpose()?;
        let ((output, answers), ended) =
            capture::during(self.device, phase, || noted::during(iteration));
        stream.map_or(Ok(()), OnStream::leave)?;
        let output = output?;
        ended.failure.map_or(Ok(()), Err)?;
        self.latest = Some(Latest { output, answers });
        self.take_members(ended.members);
        Ok(())
    }

    /// Captures an iteration.
    fn capture(
        &mut self,
        iteration: impl FnOnce() -> Result<T>,
        at: &'static Location<'static>,
    ) -> Result<()> {
        self.members.iter().try_for_each(|member| member.before_capture())?;
        clear_autocast_cache();
        // Also after a panic of the iteration.
        self.recapture();
        let Some(graph) = &self.graph else { return Ok(()) };
        let stream = OnStream::enter(graph)?;
        let capturing = Capturing::begin(graph)?;
        let ((output, answers), ended) =
            capture::during(self.device, Phase::Capture, || noted::during(iteration));
        let recorded = capturing.end();
        let left = stream.leave();
        let Ended { members, kept, counts, window_was_cut, failure } = ended;
        let checked = output.and_then(|output| {
            failure.map_or(Ok(()), Err)?;
            recorded.and(left)?;
            refuse_cut_window(window_was_cut)?;
            members.iter().try_for_each(|member| member.after_capture())?;
            Ok(output)
        });
        match checked {
            Ok(output) => {
                self.latest = Some(Latest { output, answers });
                (self.kept, self.counts) = (kept, counts);
                self.take_members(members);
                self.stage = Stage::Captured { at };
                Ok(())
            }
            Err(error) => {
                members.iter().for_each(|member| member.after_failure());
                Err(error)
            }
        }
    }

    fn take_members(&mut self, members: Vec<Arc<dyn Member>>) {
        self.changes = members.iter().map(|member| member.link().changes()).collect();
        self.members = members;
    }

    /// Fails if something has changed since the capture that a replay does not follow.
    fn check_changes(&self) -> Result<()> {
        for (member, known) in self.members.iter().zip(&self.changes) {
            if member.link().changes() != *known {
                return Err(capture::changed_since(member.link().last_change()));
            }
        }
        Ok(())
    }

    fn launch(&self) -> Result<()> {
        self.members.iter().try_for_each(|member| member.check())?;
        self.members.iter().try_for_each(|member| member.before_replay())?;
        self.graph.as_ref().map_or(Ok(()), Graph::replay)?;
        for count in &self.counts {
            count.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// Fails for a call in another place of the program than the one that was captured, whose iteration may be another.
fn check_place(captured: &Location<'_>, at: &Location<'_>) -> Result<()> {
    if captured == at {
        return Ok(());
    }
    let remedy = format!("the graph has that of {captured}; make another graph for this one");
    Err(Error::Capture { call: "the iteration of another call of `replay`", remedy })
}

fn refuse_cut_window(was_cut: bool) -> Result<()> {
    match was_cut {
        true => {
            let remedy = "capture a whole window: each micro-batch has a share of its own";
            Err(capture::refusal("a part of a window of accumulation", remedy))
        }
        false => Ok(()),
    }
}

/// The time for which the graph's stream is the thread's.
struct OnStream<'g>(&'g Graph);

impl<'g> OnStream<'g> {
    fn enter(graph: &'g Graph) -> Result<Self> {
        graph.enter()?;
        Ok(Self(graph))
    }

    fn leave(self) -> Result<()> {
        self.0.leave()
    }
}

impl Drop for OnStream<'_> {
    fn drop(&mut self) {
        // Does nothing after `leave`. This is a panic of the iteration, whose message is the program's.
        drop(self.0.leave());
    }
}

/// A capture that ends when it is dropped.
struct Capturing<'g>(Option<&'g Graph>);

impl<'g> Capturing<'g> {
    fn begin(graph: &'g Graph) -> Result<Self> {
        graph.begin()?;
        Ok(Self(Some(graph)))
    }

    fn end(mut self) -> Result<()> {
        self.0.take().map_or(Ok(()), Graph::end)
    }
}

impl Drop for Capturing<'_> {
    fn drop(&mut self) {
        // Only after a panic of the iteration.
        if let Some(graph) = self.0.take() {
            drop(graph.end());
        }
    }
}
