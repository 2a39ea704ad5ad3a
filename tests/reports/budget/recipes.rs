//! The training steps of the recipes.

use recipes::gpt::{self, train::Trainer as GptTrainer};
use recipes::images::{self, batch::Set, options::Options, train::Trainer as ImageTrainer};
use recipes::{Ranks, Training};
use tch::Device;
use tch_amp::Amp;

use crate::budget::alone;

#[test]
fn the_step_of_gpt_does_no_more_than_rounding() {
    let _alone = alone();
    let ranks = Ranks::alone();
    for amp in [Amp::Bf16, Amp::Fp16] {
        let (options, text) = gpt::small(amp, 4).unwrap();
        let mut trainer = GptTrainer::new(&options, &text, Device::Cpu, &ranks).unwrap();
        trainer.budget().unwrap().assert();
        // It goes on.
        let _measured = trainer.step().unwrap();
        trainer.budget().unwrap().assert();
    }
}

#[test]
fn the_step_of_images_does_no_more_than_rounding() {
    let _alone = alone();
    let ranks = Ranks::alone();
    let (options, data) = images::small(Amp::Bf16, 4).unwrap();
    for channels_first in [false, true] {
        let options = Options { channels_first, ..options.clone() };
        let set = Set::new(&data, 1, Device::Cpu);
        let mut trainer = ImageTrainer::new(&options, &data, &set, Device::Cpu, &ranks).unwrap();
        trainer.budget().unwrap().assert();
    }
}
