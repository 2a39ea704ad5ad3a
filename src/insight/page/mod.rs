//! Everything that is known of a run, in one page.

mod exponents;
mod steps;

use std::fmt::{self, Display, Formatter};
use std::path::Path;

use run_report::{Document, Provenance};
use serde::{Deserialize, Serialize};
use torch_files::atomic;

use super::operators::percent;
use super::recording::placed;
use super::{
    Audit, BudgetReport, Cause, Culprit, Explanation, HealthReport, HistoryReport, OperatorReport,
    SavedReport,
};
use crate::error::{Error, Result};
use crate::ffi;

/// Shows everything that is known of a run in one HTML file with tables and plots, which needs no network: the loss,
/// the scale with the skipped steps and their culprits, the exponents of the gradients over time, audits with the most
/// suspicious parts first, precision budgets, what the operators cost, and what is kept for backward passes.
///
/// Fill in what there is; a section without data is left out. Its text, by `Display`, has the same for a terminal, and
/// serde keeps it as data. PyTorch has no counterpart.
///
/// # Examples
///
/// ```
/// use tch::{Device, Kind, Tensor, nn};
/// use tch_amp::insight::{Page, ScaleHealth, ScaleHistory, Tracer};
/// use tch_amp::{Autocast, GradScaler, optim::AdamW};
///
/// let vs = nn::VarStore::new(Device::Cpu);
/// let layer = nn::linear(vs.root() / "layer", 4, 4, Default::default());
/// let mut optimizer = AdamW::default().build(&vs, 1e-3)?;
/// let mut scaler = GradScaler::new(Device::Cpu)?;
/// let region = Autocast::new(Device::Cpu).dtype(Kind::Half);
///
/// let mut page = Page::new("A layer in fp16");
/// let (mut tracer, mut health) = (Tracer::new(&vs)?, ScaleHealth::new(&vs));
/// let mut history = ScaleHistory::new(10_000)?;
/// for step in 1..=40 {
///     let size = if step == 20 { 1e5 } else { 1.0 };
///     let x = Tensor::randn([8, 4], (Kind::Float, Device::Cpu)) * size;
///     let compute = || region.run(|| x.apply(&layer).square().mean(Kind::Float));
///     tracer.begin(&scaler)?;
///     optimizer.zero_grad()?;
///     let loss = compute()?;
///     scaler.backward(&loss)?;
///     health.observe(&scaler)?;
///     let outcome = scaler.step_clip_norm(&mut optimizer, 1.0)?;
///     history.set_loss(&loss)?;
///     history.record(&scaler, &outcome, 1e-3)?;
///     scaler.update()?;
///     page.explanations.extend(tracer.explain_if_skipped(&scaler, &outcome, compute)?);
///     if step % 10 == 0 {
///         page.health.push((step, health.report()?));
///         health.clear();
///     }
/// }
/// page.history = Some(history.report()?);
/// # let folder = std::env::temp_dir().join(format!("tch-amp-page-{}", std::process::id()));
/// # std::fs::create_dir_all(&folder).unwrap();
/// # let path = folder.join("run.html");
/// page.write(&path)?;
/// # std::fs::remove_dir_all(&folder).unwrap();
/// println!("{page}");
/// # assert!(page.explanations.iter().any(|explanation| explanation.iteration == 20));
/// # Ok::<(), tch_amp::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Page {
    /// The title at the top of the page and in the window.
    pub title: String,
    /// The steps: from [`ScaleHistory::report`](super::ScaleHistory::report).
    pub history: Option<HistoryReport>,
    /// Why steps were skipped: from a [`Tracer`](super::Tracer). Their iterations are taken for the numbers of the
    /// steps in `history`; see [`Tracer::after`](super::Tracer::after).
    pub explanations: Vec<Explanation>,
    /// The exponents of the gradients up to a step, in the order of the steps: from a
    /// [`ScaleHealth`](super::ScaleHealth), which is cleared after each report so that every report has its own steps.
    pub health: Vec<(u64, HealthReport)>,
    /// Audits: from [`audit`](super::audit()).
    pub audits: Vec<Audit>,
    /// Precision budgets: from a [`Budget`](super::Budget).
    #[serde(default)]
    pub budgets: Vec<BudgetReport>,
    /// The costs of operators: from a [`Profiler`](super::Profiler).
    pub operators: Vec<OperatorReport>,
    /// What iterations keep for their backward passes: from [`saved_tensors`](super::saved_tensors()).
    #[serde(default)]
    pub saved: Vec<SavedReport>,
}

impl Page {
    /// Creates a page without any section.
    pub fn new(title: &str) -> Self {
        Self { title: title.to_owned(), ..Self::default() }
    }

    /// Returns the page as HTML. It refers to no other file. It ends with the [`versions`], the time, and the command line
    /// of the program: look for secrets among its arguments before you share a page.
    pub fn to_html(&self) -> String {
        self.document().to_html()
    }

    /// Writes [`to_html`](Self::to_html) to a file. An older file is replaced as a whole or not at all.
    ///
    /// # Errors
    ///
    /// [`Error::Save`] if the file cannot be written.
    pub fn write(&self, path: impl AsRef<Path>) -> Result<()> {
        let html = self.to_html();
        let fill = &mut |out: &mut dyn atomic::Target| out.write_all(html.as_bytes());
        atomic::replace(path.as_ref(), fill).map(drop).map_err(Error::Save)
    }

    fn document(&self) -> Document {
        let mut document = Document::new(&self.title);
        document = steps::add(document, self);
        document = exponents::add(document, &self.health);
        for audit in &self.audits {
            document = audit_section(document, audit);
        }
        for report in &self.budgets {
            document = budget_section(document, report);
        }
        for report in &self.operators {
            document = operator_section(document, report);
        }
        for report in &self.saved {
            document = saved_section(document, report);
        }
        document.provenance(&Provenance::new(&versions()))
    }
}

/// Names the versions of this crate and of the libtorch that is linked, such as `tch-amp 0.1.0 and libtorch 2.13.0`: what
/// a page is made with, for the `Provenance` of a report of your own.
pub fn versions() -> String {
    format!("tch-amp {} and libtorch {}", env!("CARGO_PKG_VERSION"), ffi::libtorch_version())
}

impl Display for Page {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.title)?;
        if let Some(history) = &self.history {
            write!(f, "\n\n{history}")?;
        }
        for explanation in &self.explanations {
            write!(f, "\n\n{explanation}")?;
        }
        if let Some((step, health)) = self.health.last() {
            write!(f, "\n\nstep {step}, gradients {health}")?;
        }
        for audit in &self.audits {
            write!(f, "\n\n{audit}")?;
        }
        for report in &self.budgets {
            write!(f, "\n\n{report}")?;
        }
        for report in &self.operators {
            write!(f, "\n\n{}", report.to_string().trim_end())?;
        }
        for report in &self.saved {
            write!(f, "\n\n{}", report.to_string().trim_end())?;
        }
        Ok(())
    }
}

/// How many parts of an audit are listed.
const MOST_PARTS: usize = 60;

/// How many rows the table of a budget or of operators has.
const MOST_ROWS: usize = 40;

/// Adds an audit, with the most suspicious parts first.
fn audit_section(document: Document, audit: &Audit) -> Document {
    let (table, rest) = audit.table(MOST_PARTS);
    let document = document
        .heading(&format!("Audit in {}", audit.dtype))
        .preformatted(&audit.conclusion())
        .table(&table);
    with_rest(document, rest, "parts that are less suspicious").note(
        "Error: the distance from the results in f32, divided by their norm. × expected: the same as a multiple of what \
         roundings add up to at that depth. × noise: as a multiple of what rounding at random does. Underflow: gradients that are zero here and not in f32.",
    )
}

/// Adds a precision budget, with what is over it first.
fn budget_section(document: Document, report: &BudgetReport) -> Document {
    let (table, rest) = report.table(MOST_ROWS);
    let document = document
        .heading(&format!("Precision budget of {}", report.dtype))
        .preformatted(&report.to_string())
        .table(&table);
    with_rest(document, rest, "rows within the budget").note(
        "Error: the distance from f32, divided by the norm. Factor: how much larger it is than in f32. × noise: the distance \
         as a multiple of what rounding at random does.",
    )
}

/// Adds what the operators cost.
fn operator_section(document: Document, report: &OperatorReport) -> Document {
    let rest = report.operators.iter().skip(MOST_ROWS).map(|row| row.seconds).sum::<f64>();
    document
        .heading("Operators")
        .preformatted(report.summary().trim_end())
        .table(&report.table(MOST_ROWS))
        .note(&format!(
            "Per run. Operators that only call others, allocate memory or make views take another {}, and operators that \
             are not listed {}.",
            percent(report.share(report.wrapper_seconds)),
            percent(report.share(rest))
        ))
        .preformatted(report.sections().trim())
}

/// Adds what an iteration keeps for its backward pass, the largest rows first.
fn saved_section(document: Document, report: &SavedReport) -> Document {
    let (table, rest) = report.table(MOST_ROWS);
    let advice = report.advice().join("\n");
    let document = document
        .heading("Kept for the backward pass")
        .preformatted((report.summary() + &advice).trim_end())
        .table(&table);
    with_rest(document, rest, "smaller rows").note(
        "Each storage counts once, for the operator that saved it first. Saves: how often nodes save it. In a region: \
         f32 though the region computes in half precision.",
    )
}

/// Says how many rows a table leaves out.
fn with_rest(document: Document, rest: usize, rows: &str) -> Document {
    match rest {
        0 => document,
        rest => document.note(&format!("{rest} {rows} are not listed.")),
    }
}

/// Why a step was skipped, in a few words.
fn reason(explanation: &Explanation) -> String {
    let culprit = explanation.culprit.as_ref().map(operator);
    let culprit = || culprit.unwrap_or_else(|| "an unknown operator".to_owned());
    match &explanation.cause {
        Cause::Parameter { name } => format!("{name} was not finite before"),
        Cause::Input { operator, .. } => format!("an input of {operator} was not finite"),
        Cause::Scale { .. } => format!("the scale was too large for {}", culprit()),
        Cause::Values => culprit(),
        Cause::Finite => "finite when it was run again".to_owned(),
    }
}

/// An operator with its part of the model.
fn operator(culprit: &Culprit) -> String {
    let Culprit { operator, dtype, pass, path, after, .. } = culprit;
    format!("{operator}{}, {dtype}, {pass}", placed(path.as_deref(), after.as_deref()))
}
