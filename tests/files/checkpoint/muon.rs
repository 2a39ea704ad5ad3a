//! Muon, which is two optimizers in Python.

use tch::nn::{Init, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::optim::{AdamW, AdjustLr, Algorithm, Muon, Optimizer, ParamGroup};

use crate::checkpoint::python::losses;
use crate::checkpoint::{from_python, listed};
use testkit::bits::bits;
use testkit::checkpoints::checkpoint_of;
use testkit::files::Folder;
use testkit::python::Oracle;

/// The same model as in tests/oracle/checkpoint.py.
struct Net {
    vs: VarStore,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
}

impl Net {
    fn new() -> Self {
        let vs = VarStore::new(Device::Cpu);
        let ramp = |name: &str, path: &str, size: &[i64]| {
            let w = (vs.root() / path).var(name, size, Init::Const(0.0));
            let count = size.iter().product::<i64>();
            let values = Tensor::arange(count, (Kind::Float, Device::Cpu)) / 8 - 0.5;
            tch::no_grad(|| w.shallow_clone().copy_(&values.reshape(size)));
            w
        };
        let bias = ramp("bias", "head", &[2]);
        let weight = ramp("weight", "head", &[2, 4]);
        let hidden = ramp("weight", "hidden", &[4, 3]);
        Self { vs, hidden, weight, bias }
    }

    fn train(&self, opt: &mut Optimizer, steps: usize) -> Vec<u32> {
        let xs = Tensor::arange(12, (Kind::Float, Device::Cpu)).view([4, 3]) / 8 - 0.5;
        let losses = (0..steps).map(|_| {
            let inner = xs.linear(&self.hidden, None::<&Tensor>);
            let loss = inner.linear(&self.weight, Some(&self.bias)).square().mean(Kind::Float);
            opt.backward_step(&loss).unwrap();
            (loss.double_value(&[]) as f32).to_bits()
        });
        losses.collect()
    }

    fn restore(&self, checkpoint: &Checkpoint, opt: &mut Optimizer) -> tch_amp::Result<()> {
        checkpoint.restore().add("model", &self.vs).add("optimizer", opt).apply().map(drop)
    }
}

/// Two groups, of which the second leaves the matrix of the head to AdamW.
fn build(net: &Net) -> Optimizer {
    let muon = every_option();
    let mut opt = muon.build(&net.vs, 0.1).unwrap();
    opt.assign_group(1, &["head.weight"]).unwrap();
    opt.set_param_group(1, ParamGroup::new(0.3, Muon { use_muon: false, momentum: 0.5, ..muon }))
        .unwrap();
    opt
}

/// No option has its default, and no two have one value.
fn every_option() -> Muon {
    Muon {
        momentum: 0.875,
        nesterov: false,
        weight_decay: 0.25,
        ns_coefficients: (2.5, -2.75, 1.25),
        ns_steps: 3,
        eps: 0.0625,
        adjust_lr_fn: AdjustLr::MatchRmsAdamW,
        adamw: AdamW {
            betas: (0.5, 0.75),
            eps: 0.125,
            weight_decay: 0.375,
            amsgrad: true,
            ..Default::default()
        },
        adamw_lr_factor: 0.7,
        ..Default::default()
    }
}

fn with_factor(group: ParamGroup, factor: f64) -> Algorithm {
    match group.algorithm {
        Algorithm::Muon(muon) => Muon { adamw_lr_factor: factor, ..muon }.into(),
        other => other,
    }
}

fn groups(opt: &Optimizer) -> Vec<ParamGroup> {
    (0..opt.param_group_count()).map(|group| *opt.param_group(group).unwrap()).collect()
}

fn saved(net: &Net, opt: &mut Optimizer) -> Checkpoint {
    checkpoint_of([("model", &mut &net.vs), ("optimizer", opt)])
}

/// The bias has no gradient in the first steps, so that its state does not tell which algorithm steps it.
#[test]
fn both_formats_restore_groups_and_states() {
    let folder = Folder::new();
    let net = Net::new();
    let mut opt = build(&net);
    let frozen = net.bias.set_requires_grad(false);
    net.train(&mut opt, 2);
    drop(frozen.set_requires_grad(true));
    let checkpoint = saved(&net, &mut opt);
    for names in [["a.safetensors", "b.pt"], ["c.pt", "d.safetensors"]] {
        checkpoint.save(folder.file(names[0])).unwrap();
        Checkpoint::load(folder.file(names[0])).unwrap().save(folder.file(names[1])).unwrap();
    }
    let expected = net.train(&mut opt, 3);
    for name in ["a.safetensors", "b.pt", "c.pt", "d.safetensors"] {
        let other = Net::new();
        let mut resumed = Muon::default().build(&other.vs, 1.0).unwrap();
        other.restore(&Checkpoint::load(folder.file(name)).unwrap(), &mut resumed).unwrap();
        assert_eq!(groups(&resumed), groups(&opt), "{name}");
        assert_eq!(other.train(&mut resumed, 3), expected, "{name}");
        assert_eq!(bits(&other.bias), bits(&net.bias), "{name}");
    }
}

#[test]
fn training_resumes_from_pythons_two_optimizers() {
    let Some((folder, printed)) = from_python("checkpoint.py", "save_muon") else { return };
    let expected = losses(printed.trim());
    let load = |name: &str| Checkpoint::load(folder.file(name)).unwrap();
    let net = Net::new();
    let mut opt = Muon::default().build(&net.vs, 1.0).unwrap();
    net.restore(&load("named.pt"), &mut opt).unwrap();
    assert_eq!(net.train(&mut opt, 4), expected);
    let muon = Muon { adjust_lr_fn: AdjustLr::MatchRmsAdamW, ..Default::default() };
    let adamw = AdamW { weight_decay: 0.5, ..Default::default() };
    let rest = Muon { use_muon: false, adamw, ..Default::default() };
    assert_eq!(groups(&opt), [ParamGroup::new(0.1, muon), ParamGroup::new(0.02, rest)]);
    // Without names, the groups and the order have to be Python's.
    let net = Net::new();
    let list = [("hidden", &net.hidden), ("head", &net.weight), ("bias", &net.bias)];
    let list = || Vec::from(list.map(|(name, w)| (name, w.shallow_clone())));
    let mut opt = Muon::default().build(list(), 1.0).unwrap();
    let refused = net.restore(&load("plain.pt"), &mut opt).unwrap_err();
    assert!(refused.to_string().contains("groups of [1, 2] parameters"), "{refused}");
    opt.assign_group(1, &["head", "bias"]).unwrap();
    net.restore(&load("plain.pt"), &mut opt).unwrap();
    assert_eq!(net.train(&mut opt, 4), expected);
    // Each of the two is an optimizer of its own as well.
    let net = Net::new();
    let named = load("named.pt");
    let mut hidden = Muon::default().build(listed(&net.vs, ["hidden.weight"]), 1.0).unwrap();
    let head = listed(&net.vs, ["head.bias", "head.weight"]);
    let mut head = AdamW::default().build(head, 1.0).unwrap();
    let restore = named.restore().add("model", &net.vs);
    restore.add("muon", &mut hidden).add("adamw", &mut head).apply().unwrap();
    assert_eq!(groups(&hidden), [ParamGroup::new(0.1, muon)]);
    assert_eq!(groups(&head), [ParamGroup::new(0.02, adamw)]);
}

#[test]
fn python_resumes_with_two_optimizers_and_back() {
    let Some(python) = Oracle::find("checkpoint.py") else { return };
    let folder = Folder::new();
    let net = Net::new();
    let mut opt = build(&net);
    net.train(&mut opt, 3);
    saved(&net, &mut opt).save(folder.file("rust.pt")).unwrap();
    let printed = python.run(&["resume_muon", folder.0.to_str().unwrap()], "");
    let lines: Vec<_> = printed.lines().map(losses).collect();
    assert_eq!(lines[0], net.train(&mut opt, 4));
    for (factor, line) in [("1.0", None), ("0.5", Some(&lines[1]))] {
        let other = Net::new();
        let mut resumed = build(&other);
        let checkpoint = Checkpoint::load(folder.file(&format!("python-{factor}.pt"))).unwrap();
        other.restore(&checkpoint, &mut resumed).unwrap();
        for (group, mut want) in groups(&resumed).into_iter().zip(groups(&opt)) {
            if let (Algorithm::Muon(muon), Some(_)) = (group.algorithm, line) {
                // The learning rate of AdamW was halved, to the last bit.
                assert_eq!(group.lr * muon.adamw_lr_factor, want.lr * 0.7 * 0.5);
                want = ParamGroup { algorithm: with_factor(want, muon.adamw_lr_factor), ..want };
            }
            assert_eq!(group, want);
        }
        match line {
            Some(line) => assert_eq!(other.train(&mut resumed, 4), *line),
            None => assert_eq!(other.train(&mut resumed, 4), net.train(&mut opt, 4)),
        }
    }
}
