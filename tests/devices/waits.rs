//! Which calls synchronize: the tables of the guide's page, `docs/synchronization.md`, against what the simulated GPUs
//! count.

use std::collections::BTreeMap;
use std::fs;

use tch::nn::{self, ModuleT, OptimizerConfig, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::accumulation::Accumulation;
use tch_amp::average::Ema;
use tch_amp::buffers::{BufferSnapshot, check_buffers_finite};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::gradients::ClipNorm;
use tch_amp::loss_scale::all_finite;
use tch_amp::optim::{AdamW, Optimizer};
use tch_amp::scaler::{SpikeConfig, StepCounter, StepOutcome};
use tch_amp::schedule::StepLr;
use tch_amp::{Autocast, GradScaler, autocast, half, insight};

use testkit::files::Folder;
use testkit::python;
use testkit::simulation::Simulation;

const PAGE: &str = "docs/synchronization.md";
const GPU: Device = Device::Cuda(0);

/// A model in training, after a backward pass.
struct Training {
    vs: VarStore,
    net: nn::SequentialT,
    opt: nn::Optimizer,
    fused: Optimizer,
    scaler: GradScaler,
    xs: Tensor,
    ys: Tensor,
    mask: Tensor,
    loss: Tensor,
}

impl Training {
    fn new() -> Self {
        let vs = VarStore::new(GPU);
        let net = nn::seq_t()
            .add(nn::linear(vs.root() / "0", 16, 16, Default::default()))
            .add(nn::batch_norm1d(vs.root() / "1", 16, Default::default()));
        let opt = nn::Adam::default().build(&vs, 1e-3).unwrap();
        let fused = AdamW::default().build(&vs, 1e-3).unwrap();
        let scaler = GradScaler::new(GPU).unwrap();
        let xs = Tensor::arange(32 * 16, (Kind::Float, GPU)).sin().view([32, 16]);
        let ys = Tensor::arange(32, (Kind::Int64, GPU)).remainder(16i64);
        let mask = xs.gt(0.0);
        let loss = net.forward_t(&xs, true).cross_entropy_for_logits(&ys);
        scaler.backward_retain_graph(&loss).unwrap();
        Self { vs, net, opt, fused, scaler, xs, ys, mask, loss }
    }

    /// The outcome of a step, which only the device knows.
    fn step(&mut self) -> StepOutcome {
        let outcome = self.scaler.step_clip_norm(&mut self.fused, 1.0).unwrap();
        self.scaler.update().unwrap();
        outcome
    }
}

/// A call that is ready to be counted.
type Call = Box<dyn FnOnce()>;

fn call<T>(f: impl FnOnce() -> T + 'static) -> Call {
    Box::new(move || drop(f()))
}

/// What comes before a call, and the call.
type Prepared = fn(Training) -> Call;

/// The calls of the page, as it writes them.
const CALLS: &[(&str, Prepared)] = &[
    // tch's that synchronize.
    ("f64::try_from(&loss)?", |t| call(move || f64::try_from(&t.loss).unwrap())),
    ("loss.double_value(&[])", |t| call(move || t.loss.double_value(&[]))),
    ("Vec::<f32>::try_from(&xs.view(-1))?", |t| {
        call(move || Vec::<f32>::try_from(&t.xs.view(-1)).unwrap())
    }),
    ("println!(\"{xs}\")", |t| call(move || format!("{}", t.xs))),
    ("println!(\"{loss:?}\")", |t| call(move || format!("{:?}", t.loss))),
    ("xs == ys", |t| call(move || t.xs == t.xs.relu())),
    ("xs.allclose(&ys, 1e-5, 1e-8, false)", |t| {
        call(move || t.xs.allclose(&t.xs.relu(), 1e-5, 1e-8, false))
    }),
    ("xs.to_device(Device::Cpu)", |t| call(move || t.xs.to_device(Device::Cpu))),
    ("batch.to_device(gpu)", |_| {
        let batch = Tensor::ones([4, 4], (Kind::Float, Device::Cpu));
        call(move || batch.to_device(GPU))
    }),
    ("mask.nonzero()", |t| call(move || t.mask.nonzero())),
    ("xs.masked_select(&mask)", |t| call(move || t.xs.masked_select(&t.mask))),
    ("ys.bincount(None::<Tensor>, 10)", |t| call(move || t.ys.bincount(None::<Tensor>, 10))),
    ("ys.unique_dim(0, true, false, false)", |t| {
        call(move || t.ys.unique_dim(0, true, false, false))
    }),
    ("opt.clip_grad_norm(1.0)", |t| call(move || t.opt.clip_grad_norm(1.0))),
    ("opt.backward_step_clip_norm(&loss, 1.0)", |mut t| {
        call(move || t.opt.backward_step_clip_norm(&t.loss, 1.0))
    }),
    ("net.batch_accuracy_for_logits(&xs, &ys, gpu, 512)", |t| {
        call(move || t.net.batch_accuracy_for_logits(&t.xs, &t.ys, GPU, 512))
    }),
    ("vs.save(path)?", |t| {
        let folder = Folder::new();
        call(move || t.vs.save(folder.file("weights.ot")).unwrap())
    }),
    // tch's that do not.
    ("xs.size()", |t| call(move || t.xs.size())),
    ("xs.kind()", |t| call(move || t.xs.kind())),
    ("xs.device()", |t| call(move || t.xs.device())),
    ("w.grad()", |t| {
        let w = t.vs.trainable_variables().remove(0);
        call(move || w.grad())
    }),
    ("println!(\"{xs:?}\")", |t| call(move || format!("{:?}", t.xs))),
    ("net.forward_t(&xs, true)", |t| call(move || t.net.forward_t(&t.xs, true))),
    ("loss.backward()", |t| call(move || t.loss.backward())),
    ("opt.zero_grad()", |mut t| call(move || t.opt.zero_grad())),
    ("opt.step()", |mut t| call(move || t.opt.step())),
    ("opt.backward_step(&loss)", |mut t| call(move || t.opt.backward_step(&t.loss))),
    ("opt.backward_step_clip(&loss, 1.0)", |mut t| {
        call(move || t.opt.backward_step_clip(&t.loss, 1.0))
    }),
    ("opt.clip_grad_value(1.0)", |t| call(move || t.opt.clip_grad_value(1.0))),
    ("opt.set_lr(1e-3)", |mut t| call(move || t.opt.set_lr(1e-3))),
    ("total += loss.detach()", |t| {
        let mut total = Tensor::zeros([], (Kind::Float, GPU));
        call(move || total += t.loss.detach())
    }),
    ("xs * 0.5 + 1.0", |t| call(move || t.xs * 0.5 + 1.0)),
    ("xs.to_kind(Kind::BFloat16)", |t| call(move || t.xs.to_kind(Kind::BFloat16))),
    ("xs.argmax(-1, false)", |t| call(move || t.xs.argmax(-1, false))),
    ("xs.topk(5, -1, true, true)", |t| call(move || t.xs.topk(5, -1, true, true))),
    ("xs.sort(-1, true)", |t| call(move || t.xs.sort(-1, true))),
    ("xs.cross_entropy_for_logits(&ys)", |t| call(move || t.xs.cross_entropy_for_logits(&t.ys))),
    ("xs.accuracy_for_logits(&ys)", |t| call(move || t.xs.accuracy_for_logits(&t.ys))),
    ("xs.where_self(&mask, &zero)", |t| {
        let zero = Tensor::zeros([], (Kind::Float, GPU));
        call(move || t.xs.where_self(&t.mask, &zero))
    }),
    ("xs.masked_fill(&mask, 0.0)", |t| call(move || t.xs.masked_fill(&t.mask, 0.0))),
    ("Tensor::randn([8, 4], (Kind::Float, gpu))", |_| {
        call(move || Tensor::randn([8, 4], (Kind::Float, GPU)))
    }),
    ("pinned.to_device_(gpu, Kind::Float, true, false)", |_| {
        let pinned = Tensor::ones([4, 4], (Kind::Float, Device::Cpu)).pin_memory(GPU);
        call(move || pinned.to_device_(GPU, Kind::Float, true, false))
    }),
    ("(x - (-u.log()).log()).argmax(-1, false)", |t| {
        let u = t.xs.uniform(1e-6, 1.0);
        call(move || (t.xs - (-u.log()).log()).argmax(-1, false))
    }),
    // The crate's that synchronize.
    ("scaler.step(&mut opt)?", |mut t| call(move || t.scaler.step(&mut t.opt).unwrap())),
    ("scaler.step_clip_norm(&mut opt, 1.0)?", |mut t| {
        call(move || t.scaler.step_clip_norm(&mut t.opt, 1.0).unwrap())
    }),
    ("outcome.is_stepped()?", |mut t| {
        let outcome = t.step();
        call(move || outcome.is_stepped().unwrap())
    }),
    ("scaler.get_scale()?", |mut t| {
        let _outcome = t.step();
        call(move || t.scaler.get_scale().unwrap())
    }),
    ("scaler.state_dict()?", |mut t| {
        let _outcome = t.step();
        call(move || t.scaler.state_dict().unwrap())
    }),
    ("scaler.non_finite_gradients(&fused)?", |t| {
        call(move || t.scaler.non_finite_gradients(&t.fused).unwrap())
    }),
    ("spikes.counts()?", |mut t| {
        let mut spikes = SpikeConfig::default().build().unwrap();
        drop(t.scaler.step_unless_spike(&mut t.fused, 1.0, &mut spikes).unwrap());
        call(move || spikes.counts().unwrap())
    }),
    ("check_buffers_finite(&vs)?", |t| call(move || check_buffers_finite(&t.vs).unwrap())),
    ("checkpoint.save(path)?", |t| {
        let folder = Folder::new();
        call(move || {
            let mut checkpoint = Checkpoint::new();
            checkpoint.add("model", &t.vs).unwrap();
            checkpoint.save(folder.file("run.safetensors")).unwrap();
        })
    }),
    ("half::to_vec::<bf16>(&xs)?", |t| {
        let xs = t.xs.to_kind(Kind::BFloat16);
        call(move || half::to_vec::<half::bf16>(&xs).unwrap())
    }),
    ("fused.clip_grad_norm(ClipNorm { error_if_nonfinite: true, ..1.0.into() })?", |t| {
        let clip = ClipNorm { error_if_nonfinite: true, ..1.0.into() };
        call(move || t.fused.clip_grad_norm(clip).unwrap())
    }),
    ("insight::audit(&vs, &region, &scaler, loss)?", |t| {
        let region = Autocast::new(GPU);
        call(move || {
            let loss = |region: Autocast| {
                region.run(|| t.net.forward_t(&t.xs, true).cross_entropy_for_logits(&t.ys))
            };
            insight::audit(&t.vs, &region, &t.scaler, loss).unwrap()
        })
    }),
    // The crate's that do not.
    ("autocast(gpu, || net.forward_t(&xs, true))?", |t| {
        call(move || autocast(GPU, || t.net.forward_t(&t.xs, true)).unwrap())
    }),
    ("scaler.backward(&loss)?", |t| call(move || t.scaler.backward(&t.loss).unwrap())),
    ("scaler.unscale_(&mut fused)?", |mut t| {
        call(move || t.scaler.unscale_(&mut t.fused).unwrap())
    }),
    ("scaler.step(&mut fused)?", |mut t| call(move || t.scaler.step(&mut t.fused).unwrap())),
    ("scaler.step_clip_norm(&mut fused, 1.0)?", |mut t| {
        call(move || t.scaler.step_clip_norm(&mut t.fused, 1.0).unwrap())
    }),
    ("scaler.step_unless_spike(&mut fused, 1.0, &mut spikes)?", |mut t| {
        let mut spikes = SpikeConfig::default().build().unwrap();
        call(move || t.scaler.step_unless_spike(&mut t.fused, 1.0, &mut spikes).unwrap())
    }),
    ("scaler.update()?", |mut t| {
        drop(t.scaler.step(&mut t.fused).unwrap());
        call(move || t.scaler.update().unwrap())
    }),
    ("scaler.backward_step(&mut fused, &loss)?", |mut t| {
        t.fused.zero_grad().unwrap();
        call(move || t.scaler.backward_step(&mut t.fused, &t.loss).unwrap())
    }),
    ("fused.zero_grad()?", |mut t| call(move || t.fused.zero_grad().unwrap())),
    ("fused.set_lr(1e-3)?", |mut t| call(move || t.fused.set_lr(1e-3).unwrap())),
    ("fused.clip_grad_norm(1.0)?", |t| call(move || t.fused.clip_grad_norm(1.0).unwrap())),
    ("outcome.poll()?", |mut t| {
        let outcome = t.step();
        call(move || outcome.poll().unwrap())
    }),
    ("outcome.total_norm()", |mut t| {
        let outcome = t.step();
        call(move || outcome.total_norm().map(Tensor::size))
    }),
    ("scheduler.step(&mut fused, &outcome)?", |mut t| {
        let mut scheduler = StepLr { step_size: 2, gamma: 0.1 }.build(&mut t.fused).unwrap();
        let outcome = t.step();
        call(move || scheduler.step(&mut t.fused, &outcome).unwrap())
    }),
    ("ema.update(&outcome)?", |mut t| {
        let mut ema = Ema { decay: 0.9, ..Ema::default() }.build(&t.vs).unwrap();
        let outcome = t.step();
        call(move || ema.update(&outcome).unwrap())
    }),
    ("steps.record(&outcome)", |mut t| {
        let mut steps = StepCounter::default();
        let outcome = t.step();
        call(move || steps.record(&outcome))
    }),
    ("window.backward(&mut scaler, &loss)?", |mut t| {
        t.fused.zero_grad().unwrap();
        let mut scaler = GradScaler::new(GPU).unwrap();
        call(move || {
            let mut window = Accumulation::of_weights([32.0, 32.0]).unwrap();
            window.backward(&mut scaler, &t.loss).unwrap();
        })
    }),
    ("all_finite(&gradients)?", |t| {
        let gradients: Vec<_> = t.vs.trainable_variables().iter().map(Tensor::grad).collect();
        call(move || all_finite(&gradients).unwrap())
    }),
    ("buffers.restore()?", |t| {
        let mut buffers = BufferSnapshot::new(&t.vs).unwrap();
        call(move || buffers.restore().unwrap())
    }),
];

/// The calls of the page's tables, and whether their section says that they synchronize.
fn listed() -> BTreeMap<String, bool> {
    let text = fs::read_to_string(python::root().join(PAGE)).unwrap();
    let mut waits = false;
    let mut calls = BTreeMap::new();
    for line in text.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            waits = !heading.contains("do not");
        }
        let Some(cell) = line.strip_prefix("| `").and_then(|row| row.split(" | ").next()) else {
            continue;
        };
        let names = cell.trim_end_matches('`').split("`, `");
        calls.extend(names.map(|name| (name.replace("\\|", "|"), waits)));
    }
    calls
}

#[test]
fn the_calls_of_the_page_synchronize_as_it_says() {
    let listed = listed();
    let tried: Vec<_> = CALLS.iter().map(|(name, _)| *name).collect();
    for name in listed.keys() {
        assert!(tried.contains(&name.as_str()), "{PAGE} lists `{name}`, which is not tried here");
    }
    for name in &tried {
        assert!(listed.contains_key(*name), "{PAGE} does not list `{name}`");
    }
    let Some(simulation) = Simulation::find() else { return };
    let mut wrong = Vec::new();
    for (name, prepare) in CALLS {
        tch::Cuda::synchronize(0);
        let call = prepare(Training::new());
        let ((), counts) = simulation.count(call);
        let (waits, found) = (listed[*name], counts.host_syncs);
        if (found > 0) != waits {
            wrong.push(format!("`{name}` synchronizes {found} times"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}
