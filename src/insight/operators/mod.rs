//! What a program computes, operator by operator: times, dtypes, casts, and the sizes of matrix products.

mod casts;
mod display;
mod flops;
mod gain;
mod lists;
mod report;
mod rows;
mod work;

use std::time::Instant;

use tch::Device;
use tch::nn::VarStore;

use super::recording::{RecordedModel, Recording};
use crate::capture;
use crate::error::{Error, Result};
use crate::ffi::insight::RecordingMode;
use crate::precision::{MatmulSpeeds, synchronize};
use crate::variables::listed;
use rows::Rows;
use work::Work;

pub(super) use display::{COLUMNS, Sections, Summary, percent};

pub use lists::AutocastList;
pub use report::{
    CastReason, CastRow, Gain, ListedOperator, MovedOperator, OperatorReport, OperatorRow, Padding,
    ProductKind, ProductRow,
};

/// Runs a part of a program and reports what its operators cost, and why half precision does not make it faster.
///
/// It records with libtorch's RecordFunction. Outside of [`run`](Self::run) nothing is recorded and nothing is slower.
/// PyTorch's counterpart for the times is `torch.profiler`.
///
/// # Examples
///
/// ```
/// use tch::nn::{self, Module};
/// use tch::{Device, Kind, Tensor};
/// use tch_amp::Autocast;
/// use tch_amp::insight::Profiler;
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let layer = nn::linear(vs.root() / "layer", 64, 10, Default::default());
/// let x = Tensor::ones([32, 64], (Kind::Float, Device::Cpu));
/// let region = Autocast::new(Device::Cpu);
/// let report = Profiler::new(&vs).run(|| {
///     let loss = region.run(|| layer.forward(&x).square().mean(Kind::Float))?;
///     Ok(loss.f_backward()?)
/// })?;
/// println!("{report}");
/// assert_eq!(report.half_share(None), Some(1.0));
/// // Forward, and the gradient of the weight.
/// assert_eq!(report.flops(), 2 * (2 * 32 * 64 * 10));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Debug)]
pub struct Profiler {
    model: RecordedModel,
    device: Device,
    warm_up: usize,
    runs: usize,
    speeds: Option<MatmulSpeeds>,
}

impl Profiler {
    /// Creates a profiler for the model of `vs`, whose variables, as they are now, give the parts of the model their
    /// names. It runs a closure twice to warm up, and then records one run.
    pub fn new(vs: &VarStore) -> Self {
        let model = RecordedModel::new(listed(vs));
        Self { model, device: vs.device(), warm_up: 2, runs: 1, speeds: None }
    }

    /// Sets how many runs come before the recorded ones. The first run of a program is slower, because it also
    /// allocates memory and chooses algorithms.
    #[must_use]
    pub fn warm_up(self, warm_up: usize) -> Self {
        Self { warm_up, ..self }
    }

    /// Sets how many runs are recorded, at least one. The report adds them up.
    #[must_use]
    pub fn runs(self, runs: usize) -> Self {
        Self { runs, ..self }
    }

    /// Lets the report estimate what half precision would gain, from the measured speeds of the device.
    #[must_use]
    pub fn matmul_speeds(self, speeds: MatmulSpeeds) -> Self {
        Self { speeds: Some(speeds), ..self }
    }

    /// Runs `f`, such as the forward and backward pass of one batch, and reports its operators. What `f` changes, such
    /// as gradients, stays changed; a run that fails or panics ends the recording.
    ///
    /// Recorded are the operators of the calling thread, and those of the backward passes that it starts, also on the
    /// threads of devices.
    ///
    /// Synchronizes with the device where each operator begins and ends, because the host cannot time a kernel
    /// otherwise. So times on a GPU are upper bounds: they include the launch of each kernel, which otherwise overlaps
    /// with the kernels before it. On the CPU they include the dispatcher, but not the work of recording.
    ///
    /// Keeps about 3 kB for each operator of a run until the run is over, of which there may be a million.
    ///
    /// # Errors
    ///
    /// The error of `f`, [`Error::InvalidArgument`] for no runs, and [`Error::Torch`] if the operators cannot be
    /// recorded.
    pub fn run<T>(&self, mut f: impl FnMut() -> Result<T>) -> Result<OperatorReport> {
        capture::refuse("a report of iterations", "make it of iterations without a graph")?;
        if self.runs == 0 {
            let problem = "is 0, but something must be recorded".to_owned();
            return Err(Error::InvalidArgument { name: "runs", problem });
        }
        let mut unrecorded_seconds = None;
        for _ in 0..self.warm_up {
            let start = Instant::now();
            drop(f()?);
            synchronize(self.device);
            unrecorded_seconds = Some(start.elapsed().as_secs_f64());
        }
        let (mut rows, mut seconds) = (Rows::default(), 0.0);
        for _ in 0..self.runs {
            let recorded = || {
                let start = Instant::now();
                drop(f()?);
                synchronize(self.device);
                Ok(start.elapsed().as_secs_f64())
            };
            let (recording, time) = Recording::of(&self.model, RecordingMode::Times, recorded)?;
            seconds += time;
            rows.add(&Work::new(&recording), self.model.parameters());
        }
        let mut report = rows.report();
        report.runs = self.runs as u64;
        report.seconds = seconds;
        report.unrecorded_seconds = unrecorded_seconds;
        report.padding = gain::padding(&report);
        if let Some(speeds) = &self.speeds {
            report.gains = gain::gains(&report, &speeds.speeds);
        }
        Ok(report)
    }
}
