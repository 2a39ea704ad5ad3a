//! The recipe `gan` as a process of its own.

use std::fs;

use recipes::gan::measure::VERDICT;
use recipes::gan::options::Options;
use recipes::gan::{self, train::Trainer};
use recipes::{Ended, Interrupt, Progress};
use tch::{Device, no_grad};
use tch_amp::Amp;

use crate::recipe::program::{self, Recipe, assert_equal};
use crate::recipe::same::alone;
use testkit::files::Folder;
use testkit::html::unclosed_tags;

pub const GAN: Recipe = Recipe {
    test: "recipe::competing::gan_program",
    prepare: |_| {},
    data: None,
    options: "--device cpu --steps 40 --log-every 1 --save-every 7",
};

/// A loss that is not finite at the end is a result like others, and no reason to lose the report.
#[test]
fn losses_that_have_diverged_are_reported() {
    let _random = alone();
    for amp in [Amp::Off, Amp::Bf16] {
        let options = Options::new(recipes::Options { amp, ..recipes::Options::silent("gan", 3) });
        let trainer = Trainer::new(&options, Device::Cpu).unwrap();
        let _filled = no_grad(|| trainer.generator.vs.trainable_variables()[0].fill_(f64::NAN));
        let (interrupt, progress) = (Interrupt::never(), Progress::silent());
        let run = gan::train_from(trainer, &options, &interrupt, &progress).unwrap();
        assert_eq!(run.ended, Ended::Finished);
        assert!(run.log.last(VERDICT).unwrap().is_nan(), "{run:?}");
        assert!(gan::report::table(&options, &run).to_string().contains("NaN"));
        let html = gan::report::page(&options, &run, Device::Cpu).to_html();
        assert_eq!(unclosed_tags(&html), [""; 0]);
        for svg in html.split("<svg").skip(1).filter_map(|rest| rest.split("</svg>").next()) {
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}

#[test]
#[ignore = "a program that other tests start"]
fn gan_program() {
    program::run(gan::main);
}

#[test]
fn ctrl_c_saves_and_the_run_goes_on_with_the_same_bits() {
    let (calm, interrupted) = (Folder::new(), Folder::new());
    let text = GAN.start(&calm, "").finish();
    let output = GAN.start_and_signal(&interrupted, "", 5, "INT");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(130), "{said}");
    assert_eq!(said.matches("--resume").count(), 1, "{said}");
    assert!(!interrupted.file("out").exists(), "there is no report of a part of a run");
    GAN.start(&interrupted, "--resume").finish();
    let (tensors, parts) = assert_equal(&interrupted, &calm, "interrupted");
    // Two networks of three layers, each parameter with two averages and a number of steps.
    assert_eq!(tensors.iter().filter(|(name, _)| !name.contains("rng")).count(), 2 * 6 * 4);
    assert!(parts.get("taken").is_some(), "{parts}");

    assert!(text.contains("bf16") && text.contains("of 8"), "{text}");
    let html = fs::read_to_string(calm.file("out")).unwrap();
    assert_eq!(html.matches("<svg").count(), 3);
    assert!(html.matches("class=\"mark\"").count() > 300 && !html.contains("NaN"), "{html}");
}

#[test]
fn ranks_are_refused() {
    let output = GAN.start(&Folder::new(), "--ranks 2").output();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && said.contains("in one process"), "{said}");
}
