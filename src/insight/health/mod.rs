//! The health of the loss scale: the exponents of the gradients, and the history of the scale.

mod history;
mod report;

use std::cmp::Ordering;
use std::collections::HashSet;

use tch::Tensor;
use tch::nn::VarStore;

use crate::GradScaler;
use crate::capture::{self, OwnLink};
#[cfg(doc)]
use crate::error::ScalerError;
use crate::error::{Error, GradientError, Result};
use crate::ffi::exponents::{self, CountedGradient};
use crate::ffi::{self, OutsideRegions};
use crate::gradients::{Gradients, uncountable};
use crate::variables::listed;

pub(super) use history::StepRecord;
pub use history::{HistoryReport, ScaleHistory, SkipCause};
pub(super) use report::{Exponents, LayerHealth};
pub use report::{HealthReport, Verdict};

/// Counts the exponents of gradients, layer by layer, to answer whether the loss scale is healthy: how many gradients
/// underflow in fp16, and how far the largest is from an overflow. PyTorch has no counterpart.
///
/// Call [`observe`](Self::observe) between backward and the optimizer's step, in every iteration or, to make its cost
/// disappear, in every hundredth. It counts on the device of the gradients and never waits for it;
/// [`report`](Self::report) does. The guide says [what the numbers mean](crate::guide::insight).
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::insight::{ScaleHealth, Verdict};
/// use tch_amp::{GradScaler, optim::AdamW};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let layer = nn::linear(vs.root() / "layer", 4, 4, Default::default());
/// let mut optimizer = AdamW::default().build(&vs, 1e-3)?;
/// let mut scaler = GradScaler::new(Device::Cpu)?;
/// let mut health = ScaleHealth::new(&vs);
/// for _ in 0..3 {
///     let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
///     optimizer.zero_grad()?;
///     scaler.backward(&(x.apply(&layer).square().mean(Kind::Float) * 1e-3))?;
///     health.observe(&scaler)?;
///     scaler.step(&mut optimizer)?;
///     scaler.update()?;
/// }
/// let report = health.report()?;
/// println!("{report}");
/// assert_eq!((report.observed, report.verdict), (3, Verdict::Healthy));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct ScaleHealth {
    parameters: Vec<Tensor>,
    names: Vec<String>,
    /// The layer of each parameter, by its place in `layers`.
    rows: Vec<usize>,
    layers: Vec<String>,
    counts: Option<Tensor>,
    /// A copy of the scale of the last observation; `None` if the scaler was disabled.
    scale: Option<Tensor>,
    /// Shared with the graphs that observe in their replays.
    link: OwnLink,
}

const OBSERVATION: &str = "the first observation of gradients";

impl ScaleHealth {
    /// Creates counts for the parameters that `vs` has now. A layer is a module: the name of a parameter without its
    /// last part, as in `layers.3.q`.
    pub fn new(vs: &VarStore) -> Self {
        Self::with_layers(vs, |name| name.rsplit_once('.').map_or("", |(module, _)| module).into())
    }

    /// Creates counts whose layers are those that `layer` returns for the names of the parameters, for instance one for
    /// each block of a transformer.
    ///
    /// # Examples
    ///
    /// ```
    /// # let vs = tch::nn::VarStore::new(tch::Device::Cpu);
    /// use tch_amp::insight::ScaleHealth;
    ///
    /// // `blocks.0.attention.q.weight` belongs to `blocks.0`.
    /// let block = |name: &str| name.split('.').take(2).collect::<Vec<_>>().join(".");
    /// let health = ScaleHealth::with_layers(&vs, block);
    /// ```
    pub fn with_layers(vs: &VarStore, mut layer: impl FnMut(&str) -> String) -> Self {
        let mut variables = listed(vs);
        variables.sort_by(|a, b| in_natural_order(&a.0, &b.0));
        let mut layers: Vec<String> = Vec::new();
        let mut row_of = |name: &str| {
            let layer = layer(name);
            layers.iter().position(|known| *known == layer).unwrap_or_else(|| {
                layers.push(layer);
                layers.len() - 1
            })
        };
        let rows = variables.iter().map(|(name, _)| row_of(name)).collect();
        let (names, parameters) = variables.into_iter().unzip();
        let (counts, scale, link) = (None, None, OwnLink::default());
        Self { parameters, names, rows, layers, counts, scale, link }
    }

    /// Counts the exponents of the gradients as they are now, between backward and the optimizer's step. They may be
    /// fp16, bf16, f32, f64 or complex, scaled or after [`unscale_`](GradScaler::unscale_), dense or COO sparse, and on
    /// several devices. Parameters that have no gradient or are frozen are left out, and duplicate indices of a sparse
    /// gradient are not added up.
    ///
    /// Never synchronizes, except where a gradient is on the CPU and the scale on a GPU. On a GPU two million elements
    /// are counted at once, with about twenty kernel launches and up to 128 MiB of memory, however many parameters they
    /// belong to. In an iteration that a graph captures, every replay counts its gradients.
    ///
    /// # Errors
    ///
    /// [`ScalerError::AlreadyStepped`] after the step, [`GradientError::Unsupported`] for a gradient of another dtype
    /// or layout, [`Error::InvalidArgument`] if there are no gradients, [`Error::Capture`] if the first observation is
    /// in the iteration that is captured, and [`Error::Torch`] if memory runs out. The counts are then as before.
    pub fn observe(&mut self, scaler: &GradScaler) -> Result<()> {
        let _own = OutsideRegions::enter();
        let names = &self.names;
        let name = Box::new(|index: usize, _| names.get(index).cloned());
        let gradients = Gradients::of(self.parameters.as_slice().into(), name)?;
        let counted = self.counted(&gradients, scaler)?;
        let scale = scaler.scale_number();
        let before = self.counts.as_ref();
        let counts = exponents::exponents_count(before, &counted, self.layers.len(), scale)?;
        let scale = scale.map(Tensor::f_detach_copy).transpose()?;
        drop(counted);
        drop(gradients);
        self.link.replace(&mut self.counts, counts, OBSERVATION)?;
        match (scale, &self.scale) {
            (Some(scale), _) => self.link.replace(&mut self.scale, scale, OBSERVATION)?,
            (None, Some(known)) if self.link.is_known() => ffi::number_set(known, 1.0)?,
            (None, _) => self.scale = None,
        }
        self.link.register(self.counts.iter().chain(&self.scale));
        Ok(())
    }

    /// The gradients to count: those that a step would use, each once.
    fn counted(
        &self,
        gradients: &Gradients<'_>,
        scaler: &GradScaler,
    ) -> Result<Vec<CountedGradient<'_>>> {
        let unscaled = scaler.unscaled(gradients.snapshot())?;
        let (mut counted, mut seen) = (Vec::new(), HashSet::new());
        for (index, gradient) in gradients.snapshot().iter().enumerate() {
            if !gradient.is_used() || !seen.insert(gradient.parameter()) {
                continue;
            }
            if let Some(problem) = uncountable(gradient) {
                let parameter = gradients.describe(index);
                return Err(Error::Gradient(GradientError::Unsupported { parameter, problem }));
            }
            let (parameter, row) = (&self.parameters[index], self.rows[index]);
            let remedy = "keep the parameters on the device of the graph";
            let call = "counting gradients on another device";
            capture::refuse_elsewhere(parameter.device(), call, remedy)?;
            let unscaled = unscaled.contains(&gradient.parameter());
            counted.push(CountedGradient { parameter, row, unscaled });
        }
        if counted.is_empty() {
            let problem = "finds no gradient: call observe between backward and the step";
            return Err(Error::InvalidArgument { name: "health", problem: problem.to_owned() });
        }
        Ok(counted)
    }

    /// Reports on everything that was observed since the beginning, or since the last [`clear`](Self::clear), at the
    /// scale of the last observation. Synchronizes.
    ///
    /// # Errors
    ///
    /// [`Error::Torch`] if the counts cannot be read from the device, and [`Error::Capture`] in an iteration of a
    /// graph.
    pub fn report(&self) -> Result<HealthReport> {
        capture::refuse("a report of gradients", "make it after `replay`")?;
        let counts = self.counts.as_ref().map(exponents::exponents_read).transpose()?;
        let counts = counts.filter(|counts| counts.observed > 0);
        let scale = match (&counts, &self.scale) {
            (Some(_), Some(scale)) => ffi::numbers_read(&[scale])?[0],
            _ => 1.0,
        };
        Ok(HealthReport::new(scale, counts.unwrap_or_default(), &self.layers))
    }

    /// Forgets what was observed.
    pub fn clear(&mut self) {
        // In place if a graph adds to them.
        if self.link.is_known() && self.zero().is_ok() {
            return;
        }
        self.link.note_change("the counts of gradients");
        (self.counts, self.scale) = (None, None);
    }

    fn zero(&mut self) -> Result<()> {
        let _own = OutsideRegions::enter();
        if let Some(counts) = &mut self.counts {
            let _same = counts.f_zero_()?;
        }
        Ok(())
    }
}

/// Compares names so that `layers.2` comes before `layers.10`.
fn in_natural_order(a: &str, b: &str) -> Ordering {
    let (mut parts, mut others) = (a.split('.'), b.split('.'));
    loop {
        let order = match (parts.next(), others.next()) {
            (None, None) => return Ordering::Equal,
            (Some(a), Some(b)) => match (a.parse::<u64>(), b.parse::<u64>()) {
                (Ok(a), Ok(b)) => a.cmp(&b),
                _ => a.cmp(b),
            },
            (a, b) => a.cmp(&b),
        };
        if order != Ordering::Equal {
            return order;
        }
    }
}
