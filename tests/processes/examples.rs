//! Every example runs, and its assertions hold.

#[path = "../../examples/accumulation.rs"]
mod accumulation;
#[path = "../../examples/clipping.rs"]
mod clipping;
#[path = "../../examples/distributed.rs"]
mod distributed;
#[path = "../../examples/fused.rs"]
mod fused;
#[path = "../../examples/insight.rs"]
#[allow(dead_code, reason = "the test chooses the path of the page")]
mod insight;
#[path = "../../examples/lost_updates.rs"]
#[allow(dead_code, reason = "the test chooses the path of the picture")]
mod lost_updates;
#[path = "../../examples/matmul.rs"]
mod matmul;
#[path = "../../examples/multiple.rs"]
mod multiple;
#[path = "../../examples/own_optimizer.rs"]
mod own_optimizer;
#[path = "../../examples/penalty.rs"]
mod penalty;
#[path = "../../examples/policy.rs"]
#[allow(dead_code, reason = "the tests choose the options")]
mod policy;
#[path = "../../examples/resume.rs"]
mod resume;
#[path = "../../examples/sparsemax.rs"]
mod sparsemax;
#[path = "../../examples/threads.rs"]
mod threads;
#[path = "../../examples/train.rs"]
mod train;
#[path = "../../examples/tutorial_1_f32.rs"]
mod tutorial_1_f32;
#[path = "../../examples/tutorial_2_amp.rs"]
mod tutorial_2_amp;
#[path = "../../examples/tutorial_3_scaler.rs"]
mod tutorial_3_scaler;
#[path = "../../examples/tutorial_4_schedule.rs"]
mod tutorial_4_schedule;
#[path = "../../examples/tutorial_5_resume.rs"]
mod tutorial_5_resume;
#[path = "../../examples/tutorial_6_insight.rs"]
mod tutorial_6_insight;
#[path = "../../examples/tutorial_7_plan.rs"]
mod tutorial_7_plan;
#[path = "../../examples/tutorial_8_actor_critic.rs"]
mod tutorial_8_actor_critic;

use anyhow::Context;
use recipes::text_classifier::batch::Collate;
use recipes::text_classifier::model::{Classifier, Dropout, Pooling};
use recipes::text_classifier::pretrained;
use recipes::{gan, gpt, images, inference, text_classifier};
use serde_json::json;
use std::path::Path;
use tch::Device;
use tch::nn::VarStore;
use tch_amp::Amp;
use testkit::bits;
use testkit::files::Folder;
use testkit::python::Oracle;

/// Tests that run the `main` of examples, with the type that it returns its errors in.
macro_rules! runs {
    ($result:ty; $($test:ident: $example:ident,)*) => { $(
        #[test]
        fn $test() -> $result {
            $example::main()?;
            Ok(())
        }
    )* };
}

runs! {
    anyhow::Result<()>;
    train_runs: train,
    clipping_runs: clipping,
    accumulation_runs: accumulation,
    distributed_runs: distributed,
    penalty_runs: penalty,
    multiple_runs: multiple,
    threads_runs: threads,
    own_optimizer_runs: own_optimizer,
    fused_runs: fused,
    matmul_runs: matmul,
    sparsemax_runs: sparsemax,
}

runs! {
    Result<(), Box<dyn std::error::Error>>;
    tutorial_1_f32_runs: tutorial_1_f32,
    tutorial_2_amp_runs: tutorial_2_amp,
    tutorial_3_scaler_runs: tutorial_3_scaler,
    tutorial_4_schedule_runs: tutorial_4_schedule,
    tutorial_5_resume_runs: tutorial_5_resume,
    tutorial_6_insight_runs: tutorial_6_insight,
    tutorial_7_plan_runs: tutorial_7_plan,
    tutorial_8_actor_critic_runs: tutorial_8_actor_critic,
}

#[test]
fn lost_updates_runs() -> anyhow::Result<()> {
    let (_folder, path) = Folder::with("lost-updates.svg");
    lost_updates::run(&path)?;
    let picture = std::fs::read_to_string(&path)?;
    anyhow::ensure!(
        picture.matches("<polyline").count() == 7,
        "expected six means and a single weight"
    );
    anyhow::ensure!(picture.starts_with("<svg ") && picture.trim_end().ends_with("</svg>"));
    anyhow::ensure!(!picture.contains("NaN") && !picture.contains("inf"));
    Ok(())
}

#[test]
fn resume_runs() -> anyhow::Result<()> {
    resume::run(&["examples::resume_runs", "--exact", "--nocapture"])
}

#[test]
fn policy_runs() -> anyhow::Result<()> {
    for policy in ["full", "p=f32,c=half,o=f32", "c=bf16", "O1", "O2", "bf16"] {
        for loss_scale in ["none", "1024", "dynamic:65536"] {
            policy::run(policy, loss_scale)?;
        }
    }
    let error = policy::run("full", "adaptive").unwrap_err().to_string();
    anyhow::ensure!(error.contains("`adaptive`"), "{error}");
    Ok(())
}

/// A few steps. `tests/processes/recipe` starts it as a program, which it interrupts.
#[test]
fn gan_runs() -> anyhow::Result<()> {
    for (amp, steps) in [(Amp::Off, 20), (Amp::Bf16, 20), (Amp::Fp16, 6)] {
        let run = gan::short_run(Device::Cpu, amp, steps)?;
        let loss = run.log.last(gan::measure::DISCRIMINATOR);
        anyhow::ensure!(loss.is_some_and(f64::is_finite), "{run:?}");
        // The first scales of fp16 are too large, and lowering them skips steps.
        anyhow::ensure!(run.skipped == 0 || amp == Amp::Fp16, "{run:?}");
    }
    println!("{}", gan::bce::plain_bce(Device::Cpu)?);
    Ok(())
}

/// A few steps. `tests/processes/recipe` starts it as a program, which it kills and interrupts, also on two ranks.
#[test]
fn gpt_runs() -> anyhow::Result<()> {
    for (amp, steps) in [(Amp::Off, 5), (Amp::Bf16, 5), (Amp::Fp16, 2)] {
        let run = gpt::short_run(Device::Cpu, amp, steps)?;
        anyhow::ensure!(run.log.rows().len() == steps as usize, "{run:?}");
        let loss = run.log.last(recipes::measure::HELD_OUT);
        anyhow::ensure!(loss.is_some_and(|loss| (4.0..7.0).contains(&loss)), "{run:?}");
    }
    Ok(())
}

/// A few steps, in which it learns to tell sentences apart, and in fp16 a single one, which is slow on the CPU.
#[test]
fn text_classifier_runs() -> anyhow::Result<()> {
    for (amp, steps) in [(Amp::Off, 40), (Amp::Bf16, 40), (Amp::Fp16, 1)] {
        let run = text_classifier::short_run(Device::Cpu, amp, steps)?;
        anyhow::ensure!(run.log.rows().len() == steps as usize, "{run:?}");
        let accuracy = run.test.accuracy();
        anyhow::ensure!(accuracy > 0.9 || amp == Amp::Fp16, "{amp:?}: {run:?}");
        // The best weights are those that were reloaded.
        let accuracies = run.log.series(recipes::measure::ACCURACY);
        let best = accuracies.iter().map(|point| point.1).fold(0.0, f64::max);
        anyhow::ensure!(best == run.held_out.accuracy(), "{best}: {run:?}");
    }
    Ok(())
}

/// A few steps, in which it learns to tell bars apart, and in fp16 fewer, which are slow on the CPU.
#[test]
fn images_runs() -> anyhow::Result<()> {
    for (amp, steps) in [(Amp::Off, 60), (Amp::Bf16, 60), (Amp::Fp16, 2)] {
        let run = images::short_run(Device::Cpu, amp, steps)?;
        anyhow::ensure!(run.log.rows().len() == steps as usize, "{run:?}");
        let tested = run.tested.as_ref().context("no test")?;
        for confusion in [&tested.averaged, &tested.last] {
            anyhow::ensure!(confusion.counts.iter().flatten().sum::<usize>() == 50, "{run:?}");
            let accuracy = confusion.accuracy();
            anyhow::ensure!(accuracy > 0.9 || amp == Amp::Fp16, "{amp:?}: {run:?}");
        }
    }
    Ok(())
}

/// The mean outputs of a pretrained model, in f32 and with padding, differ by rounding from Python's in f64 without.
fn compare_with_python(
    folder: &Path,
    args: &[&str],
    sentences: &[(&str, Option<&[i64]>)],
) -> anyhow::Result<()> {
    let Some(oracle) = Oracle::find("bert.py") else { return Ok(()) };
    let path = folder.to_string_lossy();
    let run = |args: &[&str], tokens: &[Vec<i64>]| -> anyhow::Result<Vec<Vec<f64>>> {
        let args: Vec<&str> = [&*path].into_iter().chain(args.iter().copied()).collect();
        Ok(serde_json::from_str(&oracle.run(&args, &json!(tokens).to_string()))?)
    };
    // It may write the files, before the vocabulary is read.
    assert_eq!(run(args, &[])?.len(), 0);
    let rows: Vec<_> = sentences.iter().map(|(text, _)| ((*text).to_owned(), 0)).collect();
    let (tokens, config) = pretrained::describe(folder, 16)?;
    let encode = |row: &(String, i64)| tokens.encode(&row.0, 16);
    let encoded = rows.iter().map(encode).collect::<anyhow::Result<Vec<_>>>()?;
    for (found, (text, want)) in encoded.iter().zip(sentences) {
        assert!(want.is_none_or(|want| found == want), "{text}: {found:?}");
    }
    let want = run(&[], &encoded)?;

    let vs = VarStore::new(Device::Cpu);
    let dropout = Dropout { hidden: 0.1, attention: 0.1 };
    let model = Classifier::new(&vs.root(), config, Pooling::Mean, 2, dropout);
    pretrained::load(folder, Pooling::Mean, &vs)?;
    let collate = Collate { tokens: tokens.into(), length: 16, pads_to_length: false };
    let batch = collate.batch(rows.iter())?;
    let found: Vec<Vec<f32>> = Vec::try_from(model.pooled(&batch, false)?)?;
    let mut most = 0.0_f64;
    for (found, want) in found.iter().zip(&want) {
        assert_eq!(found.len(), want.len());
        let differences = found.iter().zip(want).map(|(f, w)| (f64::from(*f) - w).abs());
        most = differences.fold(most, f64::max);
    }
    println!("the largest difference is {most:.1e}");
    assert!(want.len() == rows.len() && most < 1e-5, "{most}");
    Ok(())
}

#[test]
fn a_pretrained_bert_has_the_outputs_of_python() -> anyhow::Result<()> {
    let folder = Folder::new();
    let sentences: [(&str, Option<&[i64]>); 3] = [
        ("AB cd e.", Some(&[2, 4, 6, 7, 8, 9, 10, 3])),
        ("b", Some(&[2, 5, 3])),
        ("abd, what?", Some(&[2, 4, 6, 8, 11, 1, 1, 3])),
    ];
    compare_with_python(&folder.0, &["random"], &sentences)
}

/// With a model from elsewhere: `TCH_AMP_TEST_BERT` is its folder.
#[test]
#[ignore = "needs a downloaded model"]
fn a_downloaded_bert_has_the_outputs_of_python() -> anyhow::Result<()> {
    let folder = std::env::var("TCH_AMP_TEST_BERT")?;
    let sentences =
        ["A short one.", "The learning rate falls, and the loss does, too.", "Überraschung!"];
    compare_with_python(Path::new(&folder), &[], &sentences.map(|text| (text, None)))
}

/// The bad batch is skipped, and the attention is to blame.
#[test]
fn insight_runs() -> anyhow::Result<()> {
    let (_folder, file) = Folder::with("insight.html");
    let page = insight::run(&file)?;
    let culprits = page.explanations.iter().map(|explanation| explanation.culprit.as_ref());
    let culprits: Vec<_> = culprits.flatten().map(|culprit| culprit.path.as_deref()).collect();
    anyhow::ensure!(culprits == [Some("attention")], "{page}");
    anyhow::ensure!(std::fs::read_to_string(&file)? == page.to_html(), "another page was written");
    Ok(())
}

/// Python gets the same bits from the same file.
#[test]
fn inference_runs() -> anyhow::Result<()> {
    let (_folder, file) = Folder::with("inference.pt");
    let compared = inference::run(Device::Cpu, &file, 32, 3)?;
    anyhow::ensure!(compared.table.rows.len() == 4, "{compared:?}");
    // The report can be made, too.
    inference::page(&compared, Device::Cpu).to_html();
    let inference::Compared { inputs, outputs, .. } = compared;
    let Some(oracle) = Oracle::find("inference.py") else { return Ok(()) };
    let request = json!({ "shape": inputs.size(), "bits": bits::hex(&inputs) }).to_string();
    let threads = tch::get_num_threads().to_string();
    let path = file.to_string_lossy();
    let printed = oracle.run(&[&path, &threads], &request);
    anyhow::ensure!(printed.trim() == bits::hex(&outputs), "Python's outputs differ");
    Ok(())
}

/// A line of a program, and where it is one that docs.rs hides, the line without its mark.
fn shown(line: &str) -> &str {
    line.strip_prefix("# ").unwrap_or(line).trim_end()
}

/// The tutorial has the programs of the files, but for the comments at their beginning and before `main`.
#[test]
fn the_tutorial_has_the_programs_of_its_files() -> anyhow::Result<()> {
    let root = testkit::python::root();
    let page = std::fs::read_to_string(root.join("docs/tutorial.md"))?;
    let mut blocks = page.split("```rust\n").skip(1);
    for entry in [
        "tutorial_1_f32",
        "tutorial_2_amp",
        "tutorial_3_scaler",
        "tutorial_4_schedule",
        "tutorial_5_resume",
        "tutorial_6_insight",
        "tutorial_7_plan",
        "tutorial_8_actor_critic",
    ] {
        let file = std::fs::read_to_string(root.join(format!("examples/{entry}.rs")))?;
        let file = file.replace("\npub fn main", "\nfn main");
        let block = blocks.next().and_then(|rest| rest.split("```").next());
        let block = block.with_context(|| format!("the tutorial has no program for {entry}"))?;
        let is_code = |line: &&str| !line.is_empty() && !line.starts_with("//");
        let found: Vec<_> = block.lines().map(shown).filter(is_code).collect();
        let wanted: Vec<_> = file.lines().map(str::trim_end).filter(is_code).collect();
        assert_eq!(found, wanted, "{entry}");
    }
    anyhow::ensure!(blocks.next().is_none(), "the tutorial has a program without a file");
    Ok(())
}

#[test]
fn every_example_is_run() -> anyhow::Result<()> {
    let this = include_str!("examples.rs");
    for entry in std::fs::read_dir(testkit::python::root().join("examples"))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        anyhow::ensure!(this.contains(&format!("../examples/{name}")), "no test runs {name}");
    }
    Ok(())
}
