//! Saves in the background of a training on a device: the copies arrive late, and nothing waits for them.

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor, no_grad};
use tch_amp::checkpoint::{Checkpoint, CheckpointFolder, Format};
use tch_amp::optim::{AdamW, Algorithm, MasterWeights, MomentDtype, Optimizer};

use testkit::bits::bits;
use testkit::files::Folder;
use testkit::simulation::Simulation;
use testkit::tensors::variables;

struct Training {
    vs: VarStore,
    opt: Optimizer,
}

impl Training {
    fn new(device: Device, moments: MomentDtype, masters: MasterWeights) -> Self {
        tch::manual_seed(3);
        let mut vs = VarStore::new(device);
        let _layer = nn::linear(vs.root() / "layer", 64, 64, Default::default());
        if masters != MasterWeights::None {
            vs.bfloat16();
        }
        let adamw: Algorithm = AdamW::default().into();
        let opt = adamw.master_weights(masters).moments(moments).build(&vs, 0.1).unwrap();
        Self { vs, opt }
    }

    fn step(&mut self) {
        for w in self.vs.trainable_variables() {
            (w.to_kind(Kind::Float).square() * 3.0).sum(Kind::Float).backward();
        }
        self.opt.step().unwrap();
        self.opt.zero_grad().unwrap();
    }

    fn checkpoint(&mut self) -> Checkpoint {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("model", &self.vs).unwrap();
        checkpoint.add("optimizer", &mut self.opt).unwrap();
        for (name, view) in views(self.vs.device()) {
            checkpoint.add_tensor(name, &view).unwrap();
        }
        checkpoint
    }
}

/// Views whose numbers are not those of their memory.
fn views(device: Device) -> [(&'static str, Tensor); 3] {
    let numbers = Tensor::arange(24, (Kind::Float, device)).view([3, 4, 2]) + 1.0;
    let conjugated = numbers.view_as_complex().conj();
    [
        ("transposed", numbers.transpose(0, 1)),
        ("negated", conjugated.imag()),
        ("conjugated", conjugated),
    ]
}

/// What a checkpoint restores.
fn restored(checkpoint: &Checkpoint, training: &mut Training) -> Vec<Vec<u8>> {
    let Training { vs, opt } = training;
    checkpoint.restore().add("model", &mut *vs).add("optimizer", &mut *opt).apply().unwrap();
    variables(vs).values().map(bits).collect()
}

/// The host does not wait, and the step that follows at once does not reach what is saved.
#[test]
fn the_next_steps_neither_wait_for_a_save_nor_reach_it() {
    let Some(simulation) = Simulation::find() else { return };
    let states = [
        (MomentDtype::F32, MasterWeights::None),
        (MomentDtype::EightBit, MasterWeights::None),
        (MomentDtype::F32, MasterWeights::Float),
    ];
    for device in testkit::gpus() {
        for (moments, masters) in states {
            let mut waits = Vec::new();
            for format in [Format::Safetensors, Format::Torch, Format::Dcp] {
                let temporary = Folder::new();
                let (one, other) = (temporary.file("one"), temporary.file("other"));
                let mut training = Training::new(device, moments, masters);
                training.step();
                let at_once = CheckpointFolder::new(&one).unwrap().format(format);
                let mut folder = CheckpointFolder::new(&other).unwrap().format(format);
                for step in 1..4 {
                    let expected = at_once.save(step, &training.checkpoint()).unwrap();
                    let checkpoint = training.checkpoint();
                    let (pending, counts) =
                        simulation.count(|| folder.save_async(step, &checkpoint).unwrap());
                    waits.push(counts.host_syncs);
                    training.step();
                    for mut w in training.vs.trainable_variables() {
                        let _spoiled = no_grad(|| w.g_add_scalar_(1.0));
                    }
                    pending.wait_copied().unwrap();
                    let saved = pending.wait().unwrap();
                    let [saved, expected] = [saved, expected].map(|path| {
                        let mut new = Training::new(device, moments, masters);
                        let checkpoint = Checkpoint::load(path).unwrap();
                        let saved = |(name, view): (&str, Tensor)| {
                            let saved = checkpoint.tensor(name).unwrap();
                            assert!(saved == view.to_device(Device::Cpu), "{name}");
                        };
                        views(device).into_iter().for_each(saved);
                        restored(&checkpoint, &mut new)
                    });
                    assert!(saved == expected, "{device:?} {moments:?} {masters:?} {format:?}");
                }
            }
            // The thread that writes waits for each copy, and on a busy machine it may do so before the count ends.
            let least = waits.iter().min();
            assert_eq!(least, Some(&0), "{device:?} {moments:?} {masters:?}: {waits:?}");
        }
    }
}

/// Memory that one device has filled is not filled by another.
#[test]
fn tensors_of_two_devices_change_places() {
    let Some(simulation) = Simulation::find() else { return };
    let devices = testkit::gpus();
    let [first, second] = devices[..] else {
        testkit::skipped("this takes two devices");
        return;
    };
    let temporary = Folder::new();
    let mut folder = CheckpointFolder::new(temporary.file("saves")).unwrap();
    for (step, devices) in
        (1..).zip([[first, second], [second, first], [first, first], [second, first]])
    {
        let mut checkpoint = Checkpoint::new();
        for (name, device) in ["a", "b"].into_iter().zip(devices) {
            let number = (step * 10) as f64 + f64::from(device == second);
            let tensor = Tensor::full([7], number, (Kind::Float, device));
            checkpoint.add_tensor(name, &tensor).unwrap();
        }
        let (pending, counts) = simulation.count(|| folder.save_async(step, &checkpoint).unwrap());
        assert_eq!(counts.host_syncs, 0, "{counts:?}");
        let saved = Checkpoint::load(pending.wait().unwrap()).unwrap();
        for (name, device) in ["a", "b"].into_iter().zip(devices) {
            let number = (step * 10) as f32 + f32::from(device == second);
            assert_eq!(saved.tensor(name).unwrap(), Tensor::from_slice(&[number; 7]));
        }
    }
}
