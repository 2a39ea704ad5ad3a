//! A resumed run takes the same steps as one that was never interrupted. These tests have a program of their own,
//! because the random state that they save belongs to the whole process.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use tch::nn::{self, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::{Checkpoint, CheckpointError, CheckpointFolder, Rng};
use tch_amp::optim::{
    Adagrad, AdamW, Algorithm, Lion, MasterWeights, MomentDtype, Muon, Optimizer, OptimizerBuilder,
    RmsProp, Sgd,
};
use tch_amp::scaler::GradScalerConfig;
use tch_amp::{Error, GradScaler};

use testkit::bits::bits;
use testkit::files::Folder;
use testkit::for_each_device;
use testkit::programs::this_test;

/// A model with dropout, trained on shuffled rows, with an occasional overflow.
struct Shuffled {
    vs: VarStore,
    net: nn::Linear,
    opt: Optimizer,
    scaler: GradScaler,
    data: Tensor,
    step: i64,
}

impl Shuffled {
    fn new(device: Device, algorithm: Algorithm) -> Self {
        Self::with(device, Kind::Float, 24, algorithm.master_weights(MasterWeights::None))
    }

    fn with(device: Device, kind: Kind, outputs: i64, builder: OptimizerBuilder) -> Self {
        let mut vs = VarStore::new(device);
        let net = nn::linear(vs.root(), 4, outputs, Default::default());
        vs.set_kind(kind);
        let opt = builder.build(&vs, 0.1);
        let config =
            GradScalerConfig { init_scale: 64.0, growth_interval: 2, ..Default::default() };
        let scaler = config.build(device).unwrap();
        let data = Tensor::arange(32, (Kind::Float, device)).view([8, 4]) / 32.0;
        Self { vs, net, opt: opt.unwrap(), scaler, data, step: 0 }
    }

    fn train(&mut self, steps: i64) -> Vec<u64> {
        let mut losses = Vec::new();
        for _ in 0..steps {
            let rows = Tensor::randperm(8, (Kind::Int64, Device::Cpu)).to_device(self.vs.device());
            let xs = self.data.index_select(0, &rows.slice(0, 0, 4, 1)).dropout(0.5, true);
            let overflow = if self.step % 3 == 2 { f64::INFINITY } else { 1.0 };
            let xs = xs.to_kind(self.net.ws.kind());
            let loss = xs.apply(&self.net).square().mean(Kind::Float);
            self.opt.zero_grad().unwrap();
            self.scaler.backward(&(&loss * overflow)).unwrap();
            drop(self.scaler.step(&mut self.opt).unwrap());
            self.scaler.update().unwrap();
            self.step += 1;
            losses.push(loss.double_value(&[]).to_bits());
        }
        losses
    }

    fn checkpoint(&mut self) -> Checkpoint {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("model", &self.vs).unwrap();
        checkpoint.add("optimizer", &mut self.opt).unwrap();
        checkpoint.add("scaler", &mut self.scaler).unwrap();
        checkpoint.add("rng", Rng(Device::Cpu)).unwrap();
        if self.vs.device() != Device::Cpu {
            checkpoint.add("rng_device", Rng(self.vs.device())).unwrap();
        }
        checkpoint.add_value("step", &self.step).unwrap();
        checkpoint
    }

    fn save(&mut self, path: &std::path::Path) {
        self.checkpoint().save(path).unwrap();
    }

    fn load(&mut self, path: &std::path::Path) {
        self.restore(&Checkpoint::load(path).unwrap());
    }

    fn restore(&mut self, checkpoint: &Checkpoint) {
        self.step = checkpoint.value("step").unwrap();
        let mut rng = Rng(Device::Cpu);
        let mut restore = checkpoint
            .restore()
            .add("model", &self.vs)
            .add("optimizer", &mut self.opt)
            .add("scaler", &mut self.scaler)
            .add("rng", &mut rng);
        if self.vs.device() != Device::Cpu {
            restore = restore.add("rng_device", Rng(self.vs.device()));
        }
        assert_eq!(restore.apply().unwrap(), Default::default());
    }
}

/// A restore that fails, before any change or midway, leaves the state of the generator unchanged.
fn refuse(folder: &Folder, vs: &VarStore) {
    let path = folder.file("refused.pt");
    let mut checkpoint = Checkpoint::new();
    checkpoint.add("rng", Rng(Device::Cpu)).unwrap();
    checkpoint.add("weights", vs).unwrap();
    checkpoint.add_tensor("wrong", &Tensor::from(1i64)).unwrap();
    checkpoint.save(&path).unwrap();
    let checkpoint = Checkpoint::load(&path).unwrap();
    drop(Tensor::randn([10], (Kind::Float, Device::Cpu)));
    let before = bits(&Rng(Device::Cpu).get_state().unwrap());
    let unchanged = || bits(&Rng(Device::Cpu).get_state().unwrap()) == before;
    let twice = checkpoint.restore().add("rng", Rng(Device::Cpu)).add("wrong", Rng(Device::Cpu));
    assert!(matches!(twice.apply(), Err(Error::Torch(_))));
    assert!(unchanged());
    // Unlike any save, this shortens the open file, within the weights.
    let bytes = std::fs::read(&path).unwrap();
    let end = bytes.windows(15).position(|window| window == b"archive/version").unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_len(end as u64 - 200).unwrap();
    let cut = checkpoint.restore().add("rng", Rng(Device::Cpu)).add("weights", vs).apply();
    assert!(matches!(cut, Err(Error::Checkpoint(CheckpointError::Interrupted { .. }))), "{cut:?}");
    assert!(unchanged());
    // A state may be a row of a tensor.
    let state = Rng(Device::Cpu).get_state().unwrap();
    let rows = Tensor::stack(&[state.zeros_like(), state], 0);
    Rng(Device::Cpu).set_state(&rows.get(1)).unwrap();
    assert!(unchanged());
}

#[test]
fn a_resumed_run_takes_the_same_steps_around_skipped_ones() {
    let _alone = ALONE.lock().unwrap();
    let (folder, path) = Folder::with("x.safetensors");
    let algorithms: [Algorithm; 7] = [
        AdamW { amsgrad: true, ..Default::default() }.into(),
        Sgd { momentum: 0.9, ..Default::default() }.into(),
        Sgd { momentum: 0.9, dampening: 0.5, ..Default::default() }.into(),
        Adagrad::default().into(),
        RmsProp { momentum: 0.9, centered: true, ..Default::default() }.into(),
        Lion::default().into(),
        Muon::default().into(),
    ];
    for_each_device(|device| {
        for algorithm in algorithms {
            // Before the first step, after a taken step, and right before and after a skipped one.
            for before in [0, 1, 2, 3, 5] {
                tch::manual_seed(7);
                let mut whole = Shuffled::new(device, algorithm);
                whole.train(before);
                whole.save(&path);
                let expected = whole.train(5);
                tch::manual_seed(8);
                let mut resumed = Shuffled::new(device, algorithm);
                // The run that is overwritten has a history of its own.
                resumed.train(before % 2);
                resumed.load(&path);
                assert_eq!(resumed.train(5), expected, "{algorithm:?} after {before}");
                assert_eq!(bits(&resumed.net.ws), bits(&whole.net.ws));
                refuse(&folder, &resumed.vs);
            }
        }
    });
}

/// The folder of a run that another test kills, and which of [`low_bit`] it is.
const FOLDER: &str = "TCH_AMP_KILLED_FOLDER";
const CASE: &str = "TCH_AMP_KILLED_CASE";

const KILLED_STEPS: i64 = 40;

/// Runs with moments of fewer bits.
fn low_bit() -> [(Kind, OptimizerBuilder); 6] {
    let (adamw, muon) = (AdamW { weight_decay: 0.1, ..AdamW::default() }, Muon::default());
    let half = |states| adamw.master_weights(MasterWeights::Remainder).moments(states);
    let muon_in_half = muon.master_weights(MasterWeights::Remainder).moments(MomentDtype::BFloat16);
    [
        (Kind::Float, adamw.moments(MomentDtype::EightBit)),
        (Kind::Float, adamw.moments(MomentDtype::BFloat16)),
        (Kind::Float, muon.moments(MomentDtype::BFloat16)),
        (Kind::BFloat16, half(MomentDtype::EightBit)),
        (Kind::BFloat16, half(MomentDtype::BFloat16)),
        (Kind::BFloat16, muon_in_half),
    ]
}

/// A run whose weight is large enough to have such moments.
fn low_bit_run((kind, builder): (Kind, OptimizerBuilder)) -> Shuffled {
    Shuffled::with(Device::Cpu, kind, 1100, builder)
}

/// Begins a run, or goes on from its newest checkpoint, and saves each step.
#[test]
#[ignore = "a program that another test starts"]
fn a_run_that_is_killed() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let case: usize = std::env::var(CASE).unwrap().parse().unwrap();
    let folder = CheckpointFolder::new(folder).unwrap();
    tch::manual_seed(7);
    let mut run = low_bit_run(low_bit()[case]);
    if let Some(found) = folder.latest().unwrap() {
        run.restore(&found.checkpoint);
    }
    while run.step < KILLED_STEPS {
        run.train(1);
        folder.save(run.step as u64, &run.checkpoint()).unwrap();
        println!("saved {}", run.step);
        std::io::stdout().flush().unwrap();
    }
}

/// Starts the run, and kills it when it has saved a few steps. Returns whether it has ended before.
fn run_and_kill(folder: &Folder, case: usize, after: usize) -> bool {
    let mut command = this_test("resume::a_run_that_is_killed");
    command.env(FOLDER, &folder.0).env(CASE, case.to_string());
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let mut saved = lines.filter(|line| line.as_ref().unwrap().starts_with("saved "));
    if saved.by_ref().take(after).count() == after {
        // Somewhere in the next steps or their saves.
        std::thread::sleep(std::time::Duration::from_micros(700 * after as u64));
        child.kill().unwrap();
    }
    child.wait().unwrap().success()
}

#[test]
fn a_killed_run_with_low_bit_moments_resumes_bit_by_bit() {
    let _alone = ALONE.lock().unwrap();
    for (case, options) in low_bit().into_iter().enumerate() {
        tch::manual_seed(7);
        let mut whole = low_bit_run(options);
        whole.train(KILLED_STEPS);
        let folder = Folder::new();
        let mut kills = 0;
        for after in [2, 6, 11, KILLED_STEPS as usize + 1] {
            if run_and_kill(&folder, case, after) {
                break;
            }
            kills += 1;
        }
        assert_eq!(kills, 3, "{case}");
        let latest = CheckpointFolder::new(&folder.0).unwrap().latest().unwrap().unwrap();
        let mut resumed = low_bit_run(options);
        resumed.restore(&latest.checkpoint);
        assert_eq!(resumed.step, KILLED_STEPS);
        for (name, weight) in whole.vs.variables() {
            assert_eq!(bits(&resumed.vs.variables()[&name]), bits(&weight), "{case}: {name}");
        }
        let [expected, found] = [&mut whole, &mut resumed].map(|run| run.opt.state_dict().unwrap());
        // Plain moments have an f32, and Muon's have none.
        assert_eq!(expected.state["weight"]["step"].kind(), Kind::Int64, "{case}");
        for (name, state) in expected.state {
            for (entry, tensor) in state {
                let there = bits(&found.state[&name][&entry]);
                assert_eq!(there, bits(&tensor), "{case}: {entry} of {name}");
            }
        }
    }
}

/// The tests share the generators of the process.
static ALONE: Mutex<()> = Mutex::new(());

#[test]
fn a_refused_restore_leaves_the_random_numbers_of_other_threads_alone() {
    let _alone = ALONE.lock().unwrap();
    for_each_device(|device| {
        let mut checkpoint = Checkpoint::new();
        checkpoint.add("rng", Rng(device)).unwrap();
        checkpoint.add_tensor("wrong", &Tensor::from(1i64)).unwrap();
        let is_refused = || {
            let restore = checkpoint.restore().add("rng", Rng(device)).add("wrong", Rng(device));
            matches!(restore.apply(), Err(Error::Torch(_)))
        };
        let draw = || Tensor::rand([1], (Kind::Double, device)).double_value(&[0]);
        let (drawn, is_done) = (AtomicUsize::new(0), AtomicBool::new(false));
        tch::manual_seed(11);
        let numbers = std::thread::scope(|scope| {
            let drawing = scope.spawn(|| {
                let mut numbers = Vec::new();
                while !is_done.load(Relaxed) {
                    numbers.push(draw());
                    drawn.store(numbers.len(), Relaxed);
                }
                numbers
            });
            // The restores during which numbers were drawn.
            let (mut met, mut refused) = (0, true);
            while met < 50 && refused && !drawing.is_finished() {
                let before = drawn.load(Relaxed);
                refused = is_refused();
                met += usize::from(drawn.load(Relaxed) > before);
            }
            is_done.store(true, Relaxed);
            assert!(refused);
            drawing.join().unwrap()
        });
        tch::manual_seed(11);
        assert!(numbers.iter().all(|number| *number == draw()), "{device:?}");
    });
}

/// Draws a tensor during which other threads have time to disturb. libtorch holds the generator's lock meanwhile.
fn draw_long() -> Vec<u8> {
    bits(&Tensor::rand([1 << 15], (Kind::Double, Device::Cpu)))
}

const LONG_DRAWS: usize = 100;

#[test]
fn a_state_that_is_read_during_a_draw_is_that_before_or_after_it() {
    let _alone = ALONE.lock().unwrap();
    let state = || bits(&Rng(Device::Cpu).get_state().unwrap());
    tch::manual_seed(13);
    let mut states = vec![state()];
    for _ in 0..LONG_DRAWS {
        drop(draw_long());
        states.push(state());
    }
    tch::manual_seed(13);
    std::thread::scope(|scope| {
        let drawing = scope.spawn(|| (0..LONG_DRAWS).for_each(|_| drop(draw_long())));
        while !drawing.is_finished() {
            assert!(states.contains(&state()));
        }
    });
}

#[test]
fn a_state_that_is_set_during_a_draw_counts_from_the_next_one() {
    let _alone = ALONE.lock().unwrap();
    tch::manual_seed(13);
    let state = Rng(Device::Cpu).get_state().unwrap();
    let expected: Vec<_> = (0..LONG_DRAWS).map(|_| draw_long()).collect();
    tch::manual_seed(13);
    let drawn: Vec<_> = std::thread::scope(|scope| {
        let drawing = scope.spawn(|| (0..LONG_DRAWS).map(|_| draw_long()).collect());
        while !drawing.is_finished() {
            Rng(Device::Cpu).set_state(&state).unwrap();
        }
        drawing.join().unwrap()
    });
    assert!(drawn.iter().all(|numbers| expected.contains(numbers)));
}

/// Where the fields are in the state of the CPU's generator.
mod place {
    use std::ops::Range;

    pub const LEFT: Range<usize> = 8..12;
    pub const SEEDED: Range<usize> = 12..16;
    pub const NEXT: Range<usize> = 16..24;
    pub const WORD: Range<usize> = 24 + 8 * 100..24 + 8 * 101;
    pub const NORMAL_X: Range<usize> = 5016..5024;
    pub const NORMAL_Y: Range<usize> = 5024..5032;
    pub const NORMAL_RHO: Range<usize> = 5032..5040;
    pub const HAS_NORMAL: Range<usize> = 5040..5044;
    pub const FLOAT_NORMAL: Range<usize> = 5048..5052;
    pub const HAS_FLOAT_NORMAL: Range<usize> = 5052..5053;
    /// The size of a state of PyTorch before 1.3.
    pub const OLD: usize = 5048;
}

/// `bytes` with other bytes at these places.
fn with(bytes: &[u8], changes: &[(std::ops::Range<usize>, &[u8])]) -> Vec<u8> {
    let mut changed = bytes.to_vec();
    for (place, value) in changes {
        changed[place.clone()].copy_from_slice(value);
    }
    changed
}

fn number(bytes: &[u8], place: std::ops::Range<usize>) -> i64 {
    let mut wide = [0; 8];
    wide[..place.len()].copy_from_slice(&bytes[place]);
    i64::from_le_bytes(wide)
}

/// Whether the generator accepts a state, by each of the ways to set one, which must agree. A refused state leaves the
/// generator as it was.
fn accepts(device: Device, bytes: &[u8]) -> bool {
    let state = Tensor::from_slice(bytes);
    let before = bits(&Rng(device).get_state().unwrap());
    let mut checkpoint = Checkpoint::new();
    checkpoint.add_tensor("rng", &state).unwrap();
    let restored = checkpoint.restore().add("rng", Rng(device)).apply();
    let set = Rng(device).set_state(&state);
    assert_eq!(restored.is_ok(), set.is_ok(), "{restored:?} {set:?}");
    if set.is_err() {
        assert!(matches!((restored, set), (Err(Error::Torch(_)), Err(Error::Torch(_)))));
        assert_eq!(bits(&Rng(device).get_state().unwrap()), before);
    }
    let accepted = bits(&Rng(device).get_state().unwrap()) != before || bytes == before;
    Rng(device).set_state(&Tensor::from_slice(&before)).unwrap();
    accepted
}

/// libtorch checks the range of each count by itself, and reads beyond its words if they do not belong together.
#[test]
fn the_counts_of_the_cpus_generator_are_those_that_a_run_reaches() {
    let _alone = ALONE.lock().unwrap();
    tch::manual_seed(5);
    let mut reached = std::collections::BTreeSet::new();
    let mut first = Vec::new();
    for _ in 0..1300 {
        let bytes = bits(&Rng(Device::Cpu).get_state().unwrap());
        reached.insert((number(&bytes, place::LEFT), number(&bytes, place::NEXT)));
        first = bytes;
        // One draw of 32 bits.
        drop(Tensor::rand([1], (Kind::Float, Device::Cpu)));
    }
    assert_eq!(reached.len(), 625);
    let near = [-1, 0, 1, 2, 3, 311, 312, 313, 314, 622, 623, 624, 625, 626, i64::from(i32::MAX)];
    let wide = [1 << 32, (1 << 32) + 1, (1 << 32) + 624, i64::MAX, -1];
    for left in near {
        for next in near.into_iter().chain(wide) {
            let fields = [
                (place::LEFT, &i32::try_from(left).unwrap().to_le_bytes()[..]),
                (place::NEXT, &next.to_le_bytes()[..]),
            ];
            let accepted = accepts(Device::Cpu, &with(&first, &fields));
            assert_eq!(accepted, reached.contains(&(left, next)), "left {left}, next {next}");
        }
    }
}

#[test]
fn the_other_fields_of_the_cpus_generator_are_checked() {
    let _alone = ALONE.lock().unwrap();
    tch::manual_seed(5);
    // An odd number of draws leaves a normal number in the cache. libtorch has a second one for f32.
    drop(Tensor::randn([1], (Kind::Double, Device::Cpu)));
    let state = bits(&Rng(Device::Cpu).get_state().unwrap());
    assert_eq!(state[place::HAS_NORMAL.start], 1);
    let cached =
        [(place::FLOAT_NORMAL, &0.5f32.to_le_bytes()[..]), (place::HAS_FLOAT_NORMAL, &[1])];
    let state = with(&state, &cached);
    Rng(Device::Cpu).set_state(&Tensor::from_slice(&state)).unwrap();
    assert_eq!(bits(&Rng(Device::Cpu).get_state().unwrap()), state);
    let old = &state[..place::OLD];
    let none: [u8; 4] = [0; 4];
    let f64s = [f64::NAN, f64::INFINITY, -1e300, 9.5].map(f64::to_le_bytes);
    let f32s = [f32::NAN, f32::NEG_INFINITY, 1e30, -9.5].map(f32::to_le_bytes);
    let mut refused = vec![
        with(&state, &[(place::SEEDED, &none)]),
        with(&state, &[(place::SEEDED, &2i32.to_le_bytes())]),
        with(&state, &[(place::SEEDED, &(-1i32).to_le_bytes())]),
        with(&state, &[(place::WORD, &(1u64 << 32).to_le_bytes())]),
        with(&state, &[(place::WORD, &u64::MAX.to_le_bytes())]),
        with(&state, &[(place::HAS_NORMAL, &2i32.to_le_bytes())]),
        with(&state, &[(place::HAS_NORMAL, &256i32.to_le_bytes())]),
        with(&state, &[(place::HAS_FLOAT_NORMAL, &[2])]),
        with(&state, &[(place::HAS_FLOAT_NORMAL, &[0xff])]),
        with(old, &[(place::LEFT, &624i32.to_le_bytes()), (place::NEXT, &624u64.to_le_bytes())]),
        with(old, &[(place::HAS_NORMAL, &3i32.to_le_bytes())]),
        with(old, &[(place::NORMAL_X, &2f64.to_le_bytes())]),
        state[..place::OLD - 1].to_vec(),
        state[..place::OLD + 1].to_vec(),
        [&state[..], &[0]].concat(),
        Vec::new(),
    ];
    refused.extend(f64s.iter().map(|number| with(&state, &[(place::NORMAL_Y, number)])));
    refused.extend(f64s.iter().map(|number| with(old, &[(place::NORMAL_RHO, number)])));
    refused.extend(f32s.iter().map(|number| with(&state, &[(place::FLOAT_NORMAL, number)])));
    for (case, bytes) in refused.iter().enumerate() {
        assert!(!accepts(Device::Cpu, bytes), "case {case}");
    }
    // What is not valid is not used.
    let unused = [(place::HAS_NORMAL, &none[..]), (place::NORMAL_Y, &f64s[0])];
    let fresh = with(&state, &[(place::HAS_FLOAT_NORMAL, &[0]), (place::NORMAL_X, &f64s[1])]);
    for bytes in [state.clone(), with(&state, &unused), fresh] {
        assert!(accepts(Device::Cpu, &bytes));
    }
    // Newer versions of libtorch take no state of an earlier one.
    if Rng(Device::Cpu).set_state(&Tensor::from_slice(old)).is_err() {
        return;
    }
    // A state of an earlier version draws the same numbers, and computes the cached one from the fields.
    let fields = [(place::NORMAL_X, 0.125f64), (place::NORMAL_RHO, 2.5)];
    let fields = fields.map(|(place, number)| (place, number.to_le_bytes()));
    let fields = fields.each_ref().map(|(place, bytes)| (place.clone(), &bytes[..]));
    let draw = || testkit::to_f64(&Tensor::rand([1000], (Kind::Float, Device::Cpu)));
    Rng(Device::Cpu).set_state(&Tensor::from_slice(&state)).unwrap();
    let expected = draw();
    Rng(Device::Cpu).set_state(&Tensor::from_slice(&with(old, &fields))).unwrap();
    let normal = Tensor::randn([1], (Kind::Double, Device::Cpu)).double_value(&[0]);
    assert_eq!(normal, 2.5 * (2.0 * std::f64::consts::PI * 0.125).sin());
    assert_eq!(draw(), expected);
}

/// The states that no tensor of a file should be taken for: what they refer to is not a plain row of bytes.
#[test]
fn a_state_is_a_plain_row_of_bytes() {
    let _alone = ALONE.lock().unwrap();
    let state = Rng(Device::Cpu).get_state().unwrap();
    let size = state.size();
    let zero = Tensor::internal_efficientzerotensor(&size[..], (Kind::Uint8, Device::Cpu));
    let mut others = vec![
        ("undefined", Tensor::new()),
        ("of another dtype", state.to_kind(Kind::Int8)),
        ("expanded", Tensor::ones([1], (Kind::Uint8, Device::Cpu)).expand(&size[..], false)),
        ("strided", Tensor::stack(&[&state, &state], 1).select(1, 0)),
        ("without memory", zero),
        ("sparse", state.to_sparse_sparse_dim(1)),
    ];
    others.extend(testkit::gpus().into_iter().map(|gpu| ("on a GPU", state.to_device(gpu))));
    let before = bits(&Rng(Device::Cpu).get_state().unwrap());
    for (what, other) in others {
        let refused = Rng(Device::Cpu).set_state(&other);
        assert!(matches!(refused, Err(Error::Torch(_))), "{what}: {refused:?}");
        assert_eq!(bits(&Rng(Device::Cpu).get_state().unwrap()), before, "{what}");
    }
}

#[test]
fn the_offset_of_a_gpus_generator_is_checked_before_its_seed_is_set() {
    let _alone = ALONE.lock().unwrap();
    for gpu in testkit::gpus() {
        tch::manual_seed(5);
        let state = bits(&Rng(gpu).get_state().unwrap());
        assert_eq!(state.len(), 16);
        for (offset, is_fine) in
            [(0, true), (4, true), (1 << 40, true), (3, false), (-4, false), (i64::MIN, false)]
        {
            let seed = 77u64.to_le_bytes();
            let bytes = with(&state, &[(0..8, &seed), (8..16, &i64::to_le_bytes(offset))]);
            assert_eq!(accepts(gpu, &bytes), is_fine, "{gpu:?}: {offset}");
        }
    }
}
