//! The digits demo, run short: it learns in every precision, and its report is well formed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
#[path = "../examples/digits/mod.rs"]
mod digits;

use common::files::Folder;
use digits::computer::Facts;
use digits::options::Options;
use digits::train::{GROWTH_INTERVAL, Precision, RunResult};
use digits::{report, table};
use std::path::PathBuf;
use std::sync::LazyLock;
use tch::Device;

static RUNS: LazyLock<Vec<RunResult>> = LazyLock::new(|| digits::run(&options(), false).unwrap());

fn options() -> Options {
    Options { device: Some(Device::Cpu), epochs: 4, ..Options::default() }
}

fn html() -> String {
    report::html(&RUNS, &Facts::gather(&options()).unwrap())
}

#[test]
fn every_run_learns() {
    assert_eq!(RUNS.iter().map(|run| run.precision).collect::<Vec<_>>(), Precision::ALL);
    for run in RUNS.iter() {
        let (first, name) = (run.steps[0].loss, run.precision.name());
        assert_eq!(run.steps.len(), 4 * 22, "{name}");
        assert!(run.final_loss < first / 3.0, "{name}: {first} to {}", run.final_loss);
        assert!(run.accuracy > 85.0, "{name}: {}", run.accuracy);
        let ratio = run.final_loss / RUNS[0].final_loss;
        assert!((0.9..1.1).contains(&ratio), "{name} loses sight of fp32: {ratio}");
    }
}

#[test]
fn a_run_that_goes_on_has_the_same_losses() {
    // First: the random numbers are the process's.
    LazyLock::force(&RUNS);
    let folder = Folder::new();
    let checkpoints = Some(folder.0.clone());
    let part = Options { epochs: 2, checkpoints, ..options() };
    digits::run(&part, false).unwrap();
    let rest = Options { epochs: 4, resume: true, ..part.clone() };
    for (run, whole) in digits::run(&rest, false).unwrap().iter().zip(RUNS.iter()) {
        let losses = |run: &RunResult| run.steps.iter().map(|step| step.loss).collect::<Vec<_>>();
        assert_eq!(losses(run), losses(whole), "{}", run.precision.name());
        assert_eq!(run.accuracy, whole.accuracy);
        assert_eq!((run.final_scale, run.skipped()), (whole.final_scale, whole.skipped()));
    }
    for (refused, word) in [
        (Options { seed: 1, ..rest.clone() }, "--seed 0"),
        (Options { resume: true, ..part }, "--epochs"),
    ] {
        let error = digits::run(&refused, false).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    let anew = Options { resume: false, epochs: 1, ..rest };
    assert_eq!(digits::run(&anew, false).unwrap()[0].steps.len(), 22);
}

#[test]
fn all_runs_start_from_the_same_weights_and_the_same_batch() {
    let first: Vec<f64> = RUNS.iter().map(|run| run.steps[0].loss).collect();
    let error = |run: usize| (first[run] / first[0] - 1.0).abs();
    // Two units in the last place of bf16 (8 bits) and of fp16 (11 bits).
    assert!(error(1) < 2.0 / 256.0 && error(2) < 2.0 / 2048.0, "{first:?}");
    assert!(error(1) > 0.0 && error(2) > 0.0, "autocast computes in another type: {first:?}");
}

#[test]
fn a_run_without_a_scaler_has_no_scale_and_skips_nothing() {
    for run in RUNS.iter().filter(|run| run.precision != Precision::Fp16) {
        assert_eq!((run.skipped(), run.final_scale), (0, None), "{}", run.precision.name());
        assert!(run.steps.iter().all(|step| step.scale.is_none()));
    }
}

#[test]
fn the_scale_halves_at_every_skip_and_doubles_after_every_clean_interval() {
    let run = RUNS.iter().find(|run| run.precision == Precision::Fp16).unwrap();
    let (mut scale, mut clean) = (65536.0, 0);
    for (index, step) in run.steps.iter().enumerate() {
        assert_eq!(step.scale, Some(scale), "step {index}");
        clean = if step.skipped { 0 } else { clean + 1 };
        if step.skipped {
            scale /= 2.0;
        } else if clean == GROWTH_INTERVAL {
            (scale, clean) = (2.0 * scale, 0);
        }
    }
    assert_eq!(run.final_scale, Some(scale));
    assert!(run.skipped() > 0, "the short run is long enough to overflow");
}

#[test]
fn the_table_has_a_row_per_run() {
    let text = table::Table::new(&RUNS).to_string();
    let names: Vec<&str> = text.lines().skip(2).map(|line| &line[..4]).collect();
    assert_eq!(names, ["fp32", "bf16", "fp16"]);
    assert!(table::verdict(&RUNS).contains("fp16"));
}

#[test]
fn the_loss_plot_draws_every_step_of_every_run() {
    let svg = report::loss_plot(&RUNS).svg();
    for run in RUNS.iter() {
        for class in ["raw", "curve"] {
            let points = polyline(&svg, &format!("{class} {}", run.precision.name()));
            assert_eq!(points.len(), run.steps.len());
        }
    }
    assert_eq!(svg.matches("<polyline").count(), 6);
}

#[test]
fn the_scale_plot_draws_the_fp16_run_and_marks_its_skips() {
    let svg = report::scale_plot(&RUNS).svg();
    let run = &RUNS[2];
    assert_eq!(polyline(&svg, "curve fp16").len(), 2 * run.steps.len());
    assert_eq!(svg.matches("<polyline").count(), 1);
    assert_eq!(svg.matches("skipped at scale").count(), run.skipped());
}

/// The points of the one polyline of this class; all of them lie inside the picture.
fn polyline(svg: &str, class: &str) -> Vec<(f64, f64)> {
    let opening = format!(r#"<polyline class="{class}" points=""#);
    let (_, rest) = svg.split_once(&opening).unwrap();
    let (points, rest) = rest.split_once('"').unwrap();
    assert!(!rest.contains(&opening), "{class} is drawn twice");
    let number = |text: &str| text.parse::<f64>().unwrap();
    let pair = |point: &str| point.split_once(',').map(|(x, y)| (number(x), number(y))).unwrap();
    let points: Vec<(f64, f64)> = points.split_whitespace().map(pair).collect();
    assert!(points.iter().all(|(x, y)| (0.0..=760.0).contains(x) && (0.0..=340.0).contains(y)));
    points
}

#[test]
fn the_report_closes_every_tag_and_fills_every_gap() {
    let html = html();
    let open = unclosed_tags(&html);
    assert!(open.is_empty(), "{open:?}");
    let (_, body) = html.split_once("</style>").unwrap();
    assert!(!body.contains(['{', '}']) && !body.contains("NaN") && !body.contains("inf"));
    assert!(body.contains(&table::verdict(&RUNS)));
}

#[test]
fn the_report_loads_nothing_from_elsewhere() {
    let html = html();
    for loader in ["src=", "<link", "<script", "@import", "url("] {
        assert!(!html.contains(loader), "{loader}");
    }
}

#[test]
fn an_unbalanced_tag_is_found() {
    assert_eq!(unclosed_tags("<p><b>x</b><br></p>"), [""; 0]);
    assert_eq!(unclosed_tags("<p><b>x</p>"), ["p", "b", "/p"]);
    assert_eq!(unclosed_tags("<svg><line x='1'/></svg><p>"), ["p"]);
}

/// What is left on the stack of open tags; a closing tag that fits nothing stays on it too.
fn unclosed_tags(html: &str) -> Vec<&str> {
    let mut open: Vec<&str> = Vec::new();
    for tag in html.split('<').skip(1).filter_map(|rest| rest.split('>').next()) {
        let name = tag.split_whitespace().next().unwrap_or_default();
        let void = tag.ends_with('/') || ["meta", "br", "!DOCTYPE"].contains(&name);
        match name.strip_prefix('/') {
            Some(closing) if open.last() == Some(&closing) => drop(open.pop()),
            _ if void => {}
            _ => open.push(name),
        }
    }
    open
}

#[test]
fn the_report_goes_where_it_is_told() {
    let options = Options { out: Some("elsewhere.html".into()), ..options() };
    assert_eq!(options.report_path(), PathBuf::from("elsewhere.html"));
    assert!(Options::default().report_path().ends_with("digits-report.html"));
}
