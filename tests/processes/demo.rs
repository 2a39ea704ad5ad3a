//! A short run of the demo: it learns in every precision, and its report is well formed.

use crate::recipe::same::alone;
use recipes::Ranks;
use recipes::demo::digits::computer::Facts;
use recipes::demo::digits::options::Options;
use recipes::demo::digits::train::{GROWTH_INTERVAL, RunResult};
use recipes::demo::digits::{report, table};
use recipes::demo::gpt::Comparison;
use recipes::demo::gpt::train::{Options as GptOptions, Tuning};
use recipes::demo::{digits, gpt};
use recipes::gpt::data::Text;
use recipes::{PRECISIONS, precision_name};
use std::path::PathBuf;
use std::sync::LazyLock;
use tch::Device;
use tch_amp::Amp;
use testkit::files::Folder;
use testkit::html::unclosed_tags;
use testkit::programs::this_test;

static RUNS: LazyLock<Vec<RunResult>> = LazyLock::new(|| {
    let _random = alone();
    run(&options()).unwrap()
});

/// A repetitive text, of which a few steps learn something.
static GPT: LazyLock<Comparison> = LazyLock::new(|| {
    let line = "    pub fn learn(&mut self, text: &[u8]) -> Result<()> { self.read(text) }\n";
    let text =
        Text::new(line.repeat(400).into_bytes(), "one line <&> again and again".into()).unwrap();
    // A few steps in bf16: where that is emulated, each takes seconds.
    let run = |precision| {
        let taken = if precision == Amp::Off { 12 } else { 5 };
        let tuning = Tuning::Never;
        let options = GptOptions { precision, tuning, steps: 12, taken, seed: 0, sample: 20 };
        gpt::run(options, &text, Device::Cpu, false).unwrap()
    };
    let _random = alone();
    Comparison {
        advice: "none".to_owned(),
        is_slow: true,
        fp32: run(Amp::Off),
        bf16: run(Amp::Bf16),
    }
});

fn options() -> Options {
    Options { device: Some(Device::Cpu), epochs: 4, ..Options::default() }
}

/// Trains in this process alone.
fn run(options: &Options) -> anyhow::Result<Vec<RunResult>> {
    digits::run(options, false, &Ranks::alone())
}

fn html() -> String {
    report::page(&RUNS, &Facts::gather(&options()).unwrap(), Some(&GPT)).to_html()
}

#[test]
fn every_run_learns() {
    assert_eq!(RUNS.iter().map(|run| run.precision).collect::<Vec<_>>(), PRECISIONS);
    for run in RUNS.iter() {
        let (first, name) = (run.steps[0].loss, precision_name(run.precision));
        assert_eq!(run.steps.len(), 4 * 22, "{name}");
        assert!(run.final_loss < first / 3.0, "{name}: {first} to {}", run.final_loss);
        assert!(run.accuracy > 85.0, "{name}: {}", run.accuracy);
        let ratio = run.final_loss / RUNS[0].final_loss;
        assert!((0.9..1.1).contains(&ratio), "{name} differs too much from fp32: {ratio}");
    }
}

#[test]
fn a_resumed_run_has_the_same_losses() {
    LazyLock::force(&RUNS);
    let _random = alone();
    let folder = Folder::new();
    let checkpoints = Some(folder.0.clone());
    let part = Options { epochs: 2, checkpoints, ..options() };
    run(&part).unwrap();
    let rest = Options { epochs: 4, resume: true, ..part.clone() };
    for (run, whole) in run(&rest).unwrap().iter().zip(RUNS.iter()) {
        let losses = |run: &RunResult| run.steps.iter().map(|step| step.loss).collect::<Vec<_>>();
        assert_eq!(losses(run), losses(whole), "{}", precision_name(run.precision));
        assert_eq!(run.accuracy, whole.accuracy);
        assert_eq!((run.final_scale, run.skipped()), (whole.final_scale, whole.skipped()));
    }
    for (refused, word) in [
        (Options { seed: 1, ..rest.clone() }, "--seed 0"),
        (Options { resume: true, ..part }, "--epochs"),
    ] {
        let error = run(&refused).unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    }
    let anew = Options { resume: false, epochs: 1, ..rest };
    assert_eq!(run(&anew).unwrap()[0].steps.len(), 22);
}

/// Two epochs on two ranks, the first of which prints the losses of each run.
#[test]
#[ignore = "a program that the next test starts"]
fn on_two_ranks() {
    if std::env::var_os("TCH_AMP_TEST_TASK").is_none() {
        return;
    }
    let options = Options { epochs: 2, ranks: Some(2), ..options() };
    let Some(ranks) = Ranks::start(options.ranks).unwrap() else { return };
    let runs = digits::run(&options, true, &ranks).unwrap();
    if ranks.is_first() {
        let losses = |run: &RunResult| run.steps.iter().map(|step| step.loss).collect::<Vec<_>>();
        let losses: Vec<_> = runs.iter().map(losses).collect();
        println!("\nlosses: {}", serde_json::to_string(&losses).unwrap());
    }
}

#[test]
fn two_ranks_learn_what_one_process_does() {
    LazyLock::force(&RUNS);
    let mut ranks = this_test("demo::on_two_ranks");
    let output = ranks.env("TCH_AMP_TEST_TASK", "ranks").output().unwrap();
    let [text, shown] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    let mut lines = text.lines().filter_map(|line| line.strip_prefix("losses: "));
    let line = lines.next().unwrap_or_else(|| panic!("{text}{shown}"));
    assert_eq!(lines.next(), None);
    let runs: Vec<Vec<f64>> = serde_json::from_str(line).unwrap();
    assert_eq!(runs.len(), RUNS.len());
    for (losses, alone) in runs.into_iter().zip(RUNS.iter()) {
        let name = precision_name(alone.precision);
        assert_eq!(losses.len(), 2 * 22, "{name}");
        // Two units in the last place of bf16, between a batch and the mean of its halves.
        assert!((losses[0] / alone.steps[0].loss - 1.0).abs() < 2.0 / 256.0, "{name}");
        let of_epoch: f64 = losses[22..].iter().sum();
        let ratio = of_epoch / alone.steps[22..44].iter().map(|step| step.loss).sum::<f64>();
        assert!((0.9..1.1).contains(&ratio), "{name} differs too much from one process: {ratio}");
        assert_eq!(shown.matches(&format!("{name}  epoch  2/2")).count(), 1, "{shown}");
    }
}

#[test]
fn the_gpt_learns_equally_in_both_precisions() {
    let Comparison { fp32, bf16, .. } = &*GPT;
    assert_eq!((fp32.losses.len(), fp32.seconds.len(), fp32.sample.len() >= 31), (12, 10, true));
    assert!(
        (5.0..6.5).contains(&fp32.losses[0]),
        "an untrained model should guess bytes: {}",
        fp32.losses[0]
    );
    for run in [fp32, bf16] {
        let last = run.losses.last().unwrap();
        assert!(*last < run.losses[0] - 1.0, "{:?}", run.losses);
    }
    // Two units in the last place of bf16 at first; then the weights differ as well.
    for (step, (of_bf16, of_fp32)) in bf16.losses.iter().zip(&fp32.losses).enumerate() {
        let bound = if step == 0 { 2.0 / 256.0 } else { 0.02 };
        assert!((of_bf16 / of_fp32 - 1.0).abs() < bound, "{:?} and {:?}", fp32.losses, bf16.losses);
    }
    assert_ne!(fp32.losses, bf16.losses, "autocast should compute in another dtype");
    let verdict = gpt::report::verdict(&GPT);
    assert!(verdict.starts_with("bf16 is ") && verdict.contains("it took only 5 of the 12 steps"));
    let rows = gpt::report::table(&GPT);
    let rows: Vec<&str> = rows.rows.iter().map(|row| row[0].as_str()).collect();
    assert_eq!(rows, ["fp32", "bf16"]);
    assert!(html().contains(&verdict) && html().contains("one line &lt;&amp;&gt; again"));
}

#[test]
fn a_bad_batch_is_explained_and_the_training_goes_on() {
    let Comparison { fp32, bf16, .. } = &*GPT;
    assert!(fp32.incident.is_none());
    let incident = bf16.incident.as_ref().unwrap();
    let culprit = incident.explanation.as_ref().unwrap().culprit.as_ref().unwrap();
    assert_eq!(culprit.operator, "aten::div", "{incident}");
    assert_eq!(culprit.path.as_deref(), Some("mean of each row"), "{incident}");
    assert!(incident.unchanged && incident.next_loss.is_finite(), "{incident}");
    let text = incident.to_string();
    assert!(
        text.contains("NaN in 1 of 8 elements") && text.contains("above zero")
            || text.contains("from zero")
    );
    assert!(html().contains("NaN in 1 of 8 elements"));
}

#[test]
fn the_gpt_reads_the_available_rust_sources() {
    let text = Text::load().unwrap();
    let _random = alone();
    let (tokens, targets) = text.batch(4, 64, Device::Cpu);
    assert_eq!((tokens.size(), targets.size()), (vec![4, 64], vec![4, 64]));
    // The targets are the same text, moved by one byte.
    let moved =
        |t: &tch::Tensor, from: i64| Vec::<i64>::try_from(t.narrow(1, from, 63).reshape([-1]));
    assert_eq!(moved(&tokens, 1).unwrap(), moved(&targets, 0).unwrap());
    // Where cargo cannot name the crates without a network, the text is this crate's.
    assert!(text.origin.starts_with("the Rust sources of tch"), "{}", text.origin);
}

#[test]
fn all_runs_start_from_the_same_weights_and_the_same_batch() {
    let first: Vec<f64> = RUNS.iter().map(|run| run.steps[0].loss).collect();
    let error = |run: usize| (first[run] / first[0] - 1.0).abs();
    // Two units in the last place of bf16 (8 bits) and of fp16 (11 bits).
    assert!(error(1) < 2.0 / 256.0 && error(2) < 2.0 / 2048.0, "{first:?}");
    assert!(
        error(1) > 0.0 && error(2) > 0.0,
        "autocast should compute in another dtype: {first:?}"
    );
}

#[test]
fn a_run_without_a_scaler_has_no_scale_and_skips_nothing() {
    for run in RUNS.iter().filter(|run| run.precision != Amp::Fp16) {
        assert_eq!(
            (run.skipped(), run.final_scale),
            (0, None),
            "{}",
            precision_name(run.precision)
        );
        assert!(run.steps.iter().all(|step| step.scale.is_none()));
    }
}

#[test]
fn the_scale_halves_at_every_skip_and_doubles_after_every_clean_interval() {
    let run = RUNS.iter().find(|run| run.precision == Amp::Fp16).unwrap();
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
    assert!(run.skipped() > 0, "the short run should be long enough to overflow");
}

#[test]
fn the_table_has_a_row_per_run() {
    let text = table::table(&RUNS).to_string();
    let names: Vec<&str> = text.lines().skip(2).map(|line| &line[..4]).collect();
    assert_eq!(names, ["fp32", "bf16", "fp16"]);
    assert!(table::verdict(&RUNS).contains("fp16"));
}

#[test]
fn the_loss_plot_draws_every_step_of_every_run() {
    let svg = report::loss_plot(&RUNS).svg();
    for run in RUNS.iter() {
        for class in ["raw", "curve"] {
            let points = polyline(&svg, &format!("{class} {}", precision_name(run.precision)));
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

/// The points of the only polyline of this class, all of which must be inside of the picture.
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
fn the_report_closes_every_tag_and_fills_every_placeholder() {
    let html = html();
    let open = unclosed_tags(&html);
    assert!(open.is_empty(), "{open:?}");
    let (_, body) = html.split_once("</style>").unwrap();
    // The text that the model writes may contain anything, and the explanation of a bad batch names a NaN.
    let mut parts = body.split("<pre>");
    let mut body = parts.next().unwrap().to_owned();
    parts.for_each(|part| body += part.split_once("</pre>").unwrap().1);
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
fn the_report_is_written_to_the_given_path() {
    let options = Options { out: Some("elsewhere.html".into()), ..options() };
    assert_eq!(options.report_path(), PathBuf::from("elsewhere.html"));
    assert!(Options::default().report_path().ends_with("demo-report.html"));
}
