//! Finds out why a step was skipped, what half precision does to the numbers of a model, whether a loss scale is
//! healthy, why half precision is not faster, with which plan it would be, and whether it differs from f32 by more than
//! rounding.
//!
//! A [`Tracer`] names the operator, and the part of the model, that made the first infinity or NaN. It runs the skipped
//! iteration again, with the random numbers that it had, and records every operator with libtorch's RecordFunction. It
//! follows the non-finite gradients back to the operator that made the first non-finite number from finite ones, as
//! opposed to those that only passed it on, and returns an [`Explanation`] with the operator, the part of the model,
//! the cause and advice.
//!
//! Until it is asked, a tracer only remembers the state of the random number generators and the scale, once per
//! iteration. A program without a tracer has no callbacks and pays nothing. PyTorch's closest counterpart is
//! `torch.autograd.detect_anomaly`, which looks at the backward pass only, and at NaN only.
//!
//! An [`audit()`] compares an iteration in half precision with the same in f32, part by part, and lists the parts that
//! should stay in f32.
//!
//! A [`ScaleHealth`] says whether the loss scale is healthy: it counts the exponents of the gradients, where these are,
//! and reports how many underflow and how far the largest is from an overflow. A [`ScaleHistory`] remembers the scale,
//! the skips and the gradient norms of the last steps.
//!
//! A [`Profiler`] reports why half precision is not faster: what the operators of an iteration cost, in which dtypes
//! they ran, and which casts were made for whom.
//!
//! A [`Budget`] tests that an iteration in half precision differs from one in f32 by rounding alone.
//!
//! A [`Tuner`] measures in which precision each operator of a model is fastest, and returns a plan for its regions.
//!
//! [`saved_tensors()`] lists what an iteration keeps for its backward pass, and what would keep less.
//!
//! A [`Page`] shows all of it in one HTML file. The crate `run-report` has what it is made of, for reports of your own.

mod audit;
mod budget;
mod dtype;
mod explanation;
mod health;
mod measure;
mod numbers;
mod operators;
mod page;
mod recording;
mod rerun;
mod saved;
mod tracer;
mod tune;

pub use audit::{Audit, audit};
pub use budget::{Budget, BudgetFile, BudgetProblem, BudgetReport, BudgetRun, ScaleFault};
pub use dtype::Dtype;
pub use explanation::{Cause, Culprit, Explanation, Values};
pub use health::{HealthReport, HistoryReport, ScaleHealth, ScaleHistory, SkipCause, Verdict};
pub use operators::{AutocastList, OperatorReport, Profiler};
pub use page::{Page, versions};
pub use recording::{Pass, named};
pub use saved::{SavedReport, saved_tensors};
pub use tracer::Tracer;
pub use tune::{Tuner, Tuning};
