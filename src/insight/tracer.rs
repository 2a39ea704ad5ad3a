//! Running a skipped iteration again.

use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::explanation::{Cause, Culprit, Explanation, Pass, Values};
use super::named;
use super::recording::{Recording, is_bad};
use super::search::{Origin, Search};
use crate::GradScaler;
use crate::buffers::BufferSnapshot;
use crate::error::{Error, Result};
use crate::ffi;
use crate::recompute::random::RandomStates;

/// The name of the product of the loss and the scale.
const SCALED_LOSS: &str = "scaled loss";

/// How often a largest scale is tried, and halved if it is not finite.
const TRIES: usize = 3;

/// Explains skipped steps: it runs an iteration again and finds the operator that made the first non-finite number.
///
/// Call [`begin`](Self::begin) before the forward pass of every iteration, and [`explain`](Self::explain) after a
/// skipped step, before the next `begin`. PyTorch has no counterpart; `torch.autograd.detect_anomaly` names only the
/// backward operators that return NaN, and slows down every iteration.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::insight::{Cause, Tracer, named};
/// use tch_amp::{Autocast, GradScaler, Result, optim::AdamW};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let layer = nn::linear(vs.root() / "layer", 4, 4, Default::default());
/// let mut optimizer = AdamW::default().build(&vs, 1e-3)?;
/// let mut scaler = GradScaler::new(Device::Cpu)?;
/// let region = Autocast::new(Device::Cpu).dtype(Kind::BFloat16);
/// let mut tracer = Tracer::new(&vs)?;
/// # let batches = [Tensor::ones([2, 4], (Kind::Float, Device::Cpu)), Tensor::full([2, 4], f64::NAN, (Kind::Float, Device::Cpu))];
/// for batch in &batches {
///     let loss = || region.run(|| named("loss", || batch.apply(&layer).square().mean(Kind::Float)));
///     tracer.begin(&scaler)?;
///     optimizer.zero_grad()?;
///     scaler.backward(&loss()?)?;
///     let skipped = scaler.step(&mut optimizer)?.is_skipped()?;
///     scaler.update()?;
///     if skipped && let Some(explanation) = tracer.explain(&scaler, loss)? {
///         println!("{explanation}");
///         assert!(matches!(explanation.cause, Cause::Input { .. }));
///     }
/// }
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct Tracer {
    parameters: Vec<(String, Tensor)>,
    devices: Vec<Device>,
    buffers: BufferSnapshot,
    iteration: u64,
    began: Option<(RandomStates, Scale)>,
    left: usize,
}

/// The scale at the beginning of an iteration.
#[derive(Debug)]
enum Scale {
    One,
    /// A copy of its own.
    Number(Tensor),
}

impl Tracer {
    /// Creates a tracer for the model of `vs`, which explains at most ten steps; see [`limit`](Self::limit). It knows
    /// the variables that `vs` has now.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the copies of the model's buffers cannot be allocated.
    pub fn new(vs: &VarStore) -> Result<Self> {
        let mut parameters: Vec<_> = vs.variables().into_iter().collect();
        parameters.sort_by(|a, b| a.0.cmp(&b.0));
        let mut devices = vec![Device::Cpu];
        for (_, parameter) in &parameters {
            if !devices.contains(&parameter.device()) {
                devices.push(parameter.device());
            }
        }
        let buffers = BufferSnapshot::new(vs)?;
        Ok(Self { parameters, devices, buffers, iteration: 0, began: None, left: 10 })
    }

    /// Sets how many steps are explained. Later calls of [`explain`](Self::explain) return `None`, so that a program
    /// whose every step is skipped does not run each iteration several times.
    #[must_use]
    pub fn limit(mut self, explanations: usize) -> Self {
        self.left = explanations;
        self
    }

    /// Remembers the random number generators and the scale at the beginning of an iteration. Does not synchronize.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if a generator cannot be read.
    pub fn begin(&mut self, scaler: &GradScaler) -> Result<()> {
        let scale = match scaler.scale_number() {
            None => Scale::One,
            Some(scale) => Scale::Number(scale.f_detach_copy()?),
        };
        self.began = Some((RandomStates::of(&self.devices)?, scale));
        self.iteration += 1;
        Ok(())
    }

    /// Runs the iteration that began last again, and finds out why its gradients are not finite. `loss` computes the
    /// unscaled loss of the same batch, as the iteration did. Returns `None` if the [`limit`](Self::limit) is reached.
    ///
    /// Random numbers are those of the iteration. Gradients, buffers and random numbers are put back afterwards, so that
    /// training goes on as without the call; `loss` must not change anything else. It runs once, and up to four times more where the scale is the cause. Under
    /// `DistributedDataParallel`, call the model itself in `loss`, so that no rank waits for others.
    ///
    /// Synchronizes after every operator.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] if no iteration has begun, the error of `loss`, and [`Error::Torch`] if the iteration
    /// cannot be recorded.
    pub fn explain(
        &mut self,
        scaler: &GradScaler,
        mut loss: impl FnMut() -> Result<Tensor>,
    ) -> Result<Option<Explanation>> {
        let Some((random, scale)) = &self.began else {
            let problem = "has no iteration: call begin before the forward pass".to_owned();
            return Err(Error::InvalidArgument { name: "tracer", problem });
        };
        if self.left == 0 {
            return Ok(None);
        }
        let before = match scale {
            Scale::One => 1.0,
            Scale::Number(scale) => scale.f_double_value(&[])?,
        };
        self.buffers.save()?;
        let replay = Replay { parameters: &self.parameters, random };
        let buffers = RestoredBuffers(&mut self.buffers);
        let found = replay.explain(before, &mut loss);
        drop(buffers);
        let (cause, culprit, gradients) = found?;
        self.left -= 1;
        let (iteration, scale_now) = (self.iteration, scaler.get_scale()?);
        Ok(Some(Explanation { iteration, scale: before, scale_now, cause, culprit, gradients }))
    }
}

/// Restores buffers when it is dropped.
struct RestoredBuffers<'a>(&'a mut BufferSnapshot);

impl Drop for RestoredBuffers<'_> {
    fn drop(&mut self) {
        // The same copies were possible the other way round.
        drop(self.0.restore());
    }
}

/// Puts gradients back when it is dropped.
struct RestoredGradients<'a> {
    parameters: &'a [Tensor],
    taken: Vec<Option<Tensor>>,
}

impl Drop for RestoredGradients<'_> {
    fn drop(&mut self) {
        let dropped = ffi::gradients_drop(self.parameters);
        drop(dropped.and_then(|()| ffi::gradients_add(self.parameters, &self.taken)));
    }
}

/// What the runs of one explanation have in common.
struct Replay<'a> {
    parameters: &'a [(String, Tensor)],
    random: &'a RandomStates,
}

/// The results of a forward and a backward pass.
struct Passes {
    scaled: Tensor,
    /// `None` for a parameter without one.
    gradients: Vec<Option<Tensor>>,
}

/// A recorded run.
struct Run {
    recording: Recording,
    /// The memory of the scaled loss.
    scaled: Option<u64>,
    /// The memory of the non-finite gradients, and of the loss if it is not finite.
    targets: Vec<u64>,
    /// The parameters with non-finite gradients.
    gradients: Vec<String>,
    finite: bool,
}

impl Replay<'_> {
    fn explain(
        &self,
        scale: f64,
        loss: &mut impl FnMut() -> Result<Tensor>,
    ) -> Result<(Cause, Option<Culprit>, Vec<String>)> {
        let run = self.record(scale, loss)?;
        if run.finite {
            return Ok((Cause::Finite, None, Vec::new()));
        }
        let mut search = Search::new(&run.recording);
        for &memory in &run.targets {
            search.follow(memory);
        }
        let origins = search.origins();
        let made = origins.iter().find(|origin| matches!(origin, Origin::Made(_)));
        match (made, origins.first()) {
            // What was given comes before what is made of it, and explains it.
            (_, Some(&Origin::Given(event, place))) => {
                Ok((self.given(&run.recording, event, place), None, run.gradients))
            }
            (Some(&Origin::Made(event)), _) => {
                let culprit = self.culprit(&run.recording, event);
                let cause = if scale != 1.0 && self.depends_on_scale(&culprit) {
                    self.of_scale(loss)?
                } else {
                    Cause::Values
                };
                Ok((cause, Some(culprit), run.gradients))
            }
            _ => Ok((Cause::Values, None, run.gradients)),
        }
    }

    fn depends_on_scale(&self, culprit: &Culprit) -> bool {
        culprit.pass == Pass::Backward || culprit.path.as_deref() == Some(SCALED_LOSS)
    }

    /// Runs forward and backward with the iteration's random numbers, and records them.
    fn record(&self, scale: f64, loss: &mut impl FnMut() -> Result<Tensor>) -> Result<Run> {
        let tensors: Vec<&Tensor> = self.parameters.iter().map(|(_, tensor)| tensor).collect();
        let (recording, Passes { scaled, gradients }) =
            self.passes(scale, loss, |passes| Recording::of(&tensors, passes))?;
        let (mut targets, mut names) = (Vec::new(), Vec::new());
        for ((name, _), gradient) in self.parameters.iter().zip(&gradients) {
            if let Some(gradient) = gradient
                && !is_finite(gradient)?
            {
                names.push(name.clone());
                targets.extend(recording.memory(gradient)?);
            }
        }
        let finite = names.is_empty() && is_finite(&scaled)?;
        let scaled = recording.memory(&scaled)?;
        if !finite {
            targets.extend(scaled);
        }
        Ok(Run { recording, scaled, targets, gradients: names, finite })
    }

    /// Whether the gradients are finite at a scale. Runs forward and backward, and records nothing.
    fn is_finite_at(&self, scale: f64, loss: &mut impl FnMut() -> Result<Tensor>) -> Result<bool> {
        let ((), Passes { scaled, gradients }) =
            self.passes(scale, loss, |passes| Ok(((), passes()?)))?;
        let mut all = gradients.iter().flatten().chain([&scaled]).map(is_finite);
        all.try_fold(true, |all, finite| Ok(all && finite?))
    }

    /// Runs forward and backward within `around`, and puts the gradients and random numbers of before back.
    fn passes<T>(
        &self,
        scale: f64,
        loss: &mut impl FnMut() -> Result<Tensor>,
        around: impl FnOnce(&mut dyn FnMut() -> Result<Tensor>) -> Result<(T, Tensor)>,
    ) -> Result<(T, Passes)> {
        let parameters = self.parameters.iter().map(|(_, tensor)| tensor.shallow_clone());
        let parameters: Vec<Tensor> = parameters.collect();
        let taken = ffi::gradients_take(&parameters)?;
        let restored = RestoredGradients { parameters: &parameters, taken };
        let mut passes = || {
            let loss = loss()?;
            let scaled = named(SCALED_LOSS, || scaled(&loss, scale))?;
            ffi::backward(&scaled, false)?;
            Ok(scaled)
        };
        let (found, scaled) = self.random.during(|| around(&mut passes))??;
        let gradients = ffi::gradients_take(&parameters)?;
        drop(restored);
        Ok((found, Passes { scaled, gradients }))
    }

    fn given(&self, recording: &Recording, event: usize, place: usize) -> Cause {
        let event = &recording.events[event];
        let tensor = &event.inputs[place];
        match tensor.parameter.and_then(|index| self.parameters.get(index)) {
            Some((name, _)) => Cause::Parameter { name: name.clone() },
            None => Cause::Input { operator: event.name.clone(), place, elements: tensor.elements },
        }
    }

    /// Whether a scale of 1 is finite, and up to which it is: the largest for which no result exceeds its dtype, and for
    /// which the passes are finite.
    fn of_scale(&self, loss: &mut impl FnMut() -> Result<Tensor>) -> Result<Cause> {
        let run = self.record(1.0, loss)?;
        if !run.finite {
            return Ok(Cause::Values);
        }
        let limits = run.recording.grown_from(run.scaled).into_iter().filter_map(|tensor| {
            let numbers = tensor.numbers.filter(|numbers| numbers.largest > 0.0)?;
            Some(most(tensor.kind?)? / numbers.largest)
        });
        let mut largest_finite = limits.fold(f64::INFINITY, f64::min).log2().floor().exp2();
        // The sums inside of an operator can exceed its result.
        for _ in 0..TRIES {
            if self.is_finite_at(largest_finite, loss)? {
                break;
            }
            largest_finite /= 2.0;
        }
        Ok(Cause::Scale { largest_finite })
    }

    fn culprit(&self, recording: &Recording, index: usize) -> Culprit {
        let modules: Vec<String> = self.parameters.iter().map(|(name, _)| module(name)).collect();
        let event = &recording.events[index];
        let (pass, forward) = recording.pass(index);
        let path = recording.path(forward.unwrap_or(index), &modules);
        let after = match path {
            None => recording.module_before(forward.unwrap_or(index), &modules),
            Some(_) => None,
        };
        let output = event.outputs.iter().find(|tensor| is_bad(tensor));
        let numbers = output.and_then(|tensor| tensor.numbers).unwrap_or_default();
        let name = |index: usize| recording.events[index].name.clone();
        Culprit {
            operator: event.name.clone(),
            within: recording.outermost(index).filter(|&outer| outer != index).map(name),
            path,
            after,
            pass,
            forward_operator: forward
                .map(|index| recording.outermost(index).map_or_else(|| name(index), name)),
            dtype: output.and_then(|tensor| tensor.kind).map_or("", dtype_name).to_owned(),
            values: Values {
                positive_infinite: numbers.positive_infinite,
                negative_infinite: numbers.negative_infinite,
                nan: numbers.nan,
                elements: output.map_or(0, |tensor| tensor.elements),
            },
            largest_inputs: event
                .inputs
                .iter()
                .filter_map(|tensor| tensor.numbers)
                .map(|numbers| numbers.largest)
                .collect(),
            largest_in_f32: event.repeated,
        }
    }
}

/// The loss times the scale, as the scaler computes it.
fn scaled(loss: &Tensor, scale: f64) -> Result<Tensor> {
    if scale == 1.0 {
        return Ok(loss.shallow_clone());
    }
    let kind = loss.f_kind()?;
    let loss =
        if kind == Kind::Double { loss.shallow_clone() } else { loss.f_to_kind(Kind::Float)? };
    let scale = ffi::number_new(scale, loss.f_kind()?, loss.device())?;
    Ok(loss.f_mul(&scale)?)
}

fn is_finite(tensor: &Tensor) -> Result<bool> {
    let values = if tensor.is_sparse() {
        tensor.f_coalesce()?.f_internal_values()?
    } else {
        tensor.f_detach()?
    };
    Ok(values.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0)
}

/// The largest finite number of a dtype.
fn most(kind: Kind) -> Option<f64> {
    match kind {
        Kind::Half => Some(65504.0),
        Kind::BFloat16 => Some(f64::from(half::bf16::MAX)),
        Kind::Float => Some(f64::from(f32::MAX)),
        Kind::Double => Some(f64::MAX),
        _ => None,
    }
}

fn dtype_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Half => "fp16",
        Kind::BFloat16 => "bf16",
        Kind::Float => "fp32",
        Kind::Double => "fp64",
        _ => "",
    }
}

/// The module of a parameter: its name without the last part.
fn module(name: &str) -> String {
    name.rsplit_once('.').map_or("", |(module, _)| module).to_owned()
}
