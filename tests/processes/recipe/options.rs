//! Options far outside of what makes sense: each is refused, or does what it says, and none takes all memory.

use tch::Device;

use crate::recipe::same::alone;
use recipes::memory::resident_peak;
use recipes::{Interrupt, Ranks};
use recipes::{gan, gpt, images, text_classifier};
use tch_amp::Amp;

/// Whole numbers at the ends of their types, also such that a width may have; and numbers that are none.
const EXTREMES: [&str; 14] = [
    "0",
    "1",
    "-1",
    "1000000007",
    "1152921504606846976",
    "9223372036854775744",
    "9223372036854775807",
    "18446744073709551615",
    "1e300",
    "1e-300",
    "NaN",
    "inf",
    "-inf",
    "",
];

/// Runs `run`, which parses the arguments and takes a step, with each extreme of each option: of the common ones, and
/// of its own. The arguments begin with others that make the step small.
fn try_all(own: &str, small: &str, run: impl Fn(Vec<String>) -> anyhow::Result<()>) {
    let before = resident_peak();
    let (mut refused, mut done) = (0, 0);
    for option in "--steps --seed --ranks".split(' ').chain(own.split_whitespace()) {
        for value in EXTREMES {
            println!("{option} {value}");
            let arguments =
                small.split(' ').chain(["--device", "cpu", "--amp", "off", option, value]);
            match run(arguments.map(str::to_owned).collect()) {
                Ok(()) => done += 1,
                Err(error) => {
                    println!("    {error:#}");
                    refused += 1;
                }
            }
        }
    }
    assert!(done > 10 && refused > 10, "{done} and {refused}");
    // Much less than the least of the sizes that are refused.
    let grown = resident_peak().zip(before).map(|(now, then)| now.saturating_sub(then));
    assert!(grown.is_none_or(|bytes| bytes < 3 << 30), "{grown:?} bytes");
}

/// Lets the run write nothing, and returns when it ends: a long one after its first step.
fn shorten(common: &mut recipes::Options) -> Interrupt {
    (common.checkpoints, common.logs, common.out) = (None, None, None);
    if common.steps > 2 { Interrupt::at_once() } else { Interrupt::never() }
}

#[test]
fn a_gpt_survives_extreme_options() {
    let _random = alone();
    let (_, text) = gpt::small(Amp::Off, 2).unwrap();
    let own = "--width --layers --length --rows --accumulate --lr --dropout --ema --eval-every --save-every \
               --log-every --sample";
    let small = "--width 64 --layers 1 --length 16 --rows 2 --steps 2 --sample 4";
    try_all(own, small, |arguments| {
        let mut options = gpt::options::Options::parse(arguments)?.unwrap();
        let interrupt = shorten(&mut options.common);
        let run = gpt::run_alone(&options, &text, Device::Cpu, &interrupt)?;
        gpt::report::page(&options, &run, &text, Device::Cpu, &Ranks::alone()).to_html();
        drop(gpt::report::table(&options, &run).to_string());
        Ok(())
    });
}

#[test]
fn a_gan_survives_extreme_options() {
    let _random = alone();
    try_all("--save-every --log-every", "--steps 2", |arguments| {
        let mut options = gan::options::Options::parse(arguments)?.unwrap();
        let interrupt = shorten(&mut options.common);
        let progress = recipes::Progress::silent();
        let run = gan::train(&options, Device::Cpu, &interrupt, &progress)?;
        gan::report::page(&options, &run, Device::Cpu).to_html();
        Ok(())
    });
}

#[test]
fn images_survive_extreme_options() {
    let _random = alone();
    let (_, data) = images::small(Amp::Off, 2).unwrap();
    let own = "--width --stages --blocks --rows --lr --swa-from --swa-every --swa-batches --move --eval-every \
               --save-every --log-every";
    let small = "--width 8 --stages 2 --rows 16 --steps 2 --swa-batches 2";
    try_all(own, small, |arguments| {
        let mut options = images::options::Options::parse(arguments)?.unwrap();
        let interrupt = shorten(&mut options.common);
        let run = images::run_alone(&options, &data, Device::Cpu, &interrupt)?;
        let (runs, ranks) = (std::slice::from_ref(&run), Ranks::alone());
        images::report::page(&options, runs, &data, Device::Cpu, &ranks).to_html();
        Ok(())
    });
}

#[test]
fn a_text_classifier_survives_extreme_options() {
    let _random = alone();
    let (_, data) = text_classifier::small(Amp::Off, 2).unwrap();
    let own = "--vocabulary --rows-limit --ratio --width --layers --length --epochs --rows --dev-rows --workers --lr \
               --weight-decay --eps --max-norm --dropout --attention-dropout --eval-every --save-every --log-every";
    let small = "--width 64 --layers 1 --length 16 --rows 8 --steps 2 --vocabulary 200";
    try_all(own, small, |arguments| {
        let mut options = text_classifier::options::Options::parse(arguments)?.unwrap();
        let interrupt = shorten(&mut options.common);
        let run = text_classifier::run_alone(&options, &data, Device::Cpu, &interrupt)?;
        let task = text_classifier::Task::new(&options, &data)?;
        let ranks = Ranks::alone();
        text_classifier::report::page(&options, &run, &task, Device::Cpu, &ranks).to_html();
        Ok(())
    });
}
