//! The precision of a training on several ranks.

use tch::nn::{self, Module, VarStore};
use tch::{Device, Kind, Tensor};
use tch_amp::autocast::{Plan, Rule, RunAs};
use tch_amp::checkpoint::Checkpoint;
use tch_amp::distributed::DistributedDataParallel;
use tch_amp::{Amp, Autocast, MixedPrecision};

use super::{assert_open, calls, ranks};

#[test]
fn precisions_that_the_ranks_have_named_differently_are_refused_on_all() {
    let plan = |operator: &str| {
        let rules = vec![Rule::new(operator, RunAs::F32)];
        let plan = Plan { dtype: Some(Kind::BFloat16), rules, ..Plan::new(Device::Cpu).unwrap() };
        Amp::Off.on(Device::Cpu).unwrap().plan(&plan).unwrap()
    };
    let named = |amp: Amp| amp.on(Device::Cpu).unwrap();
    let cases: [(&str, &str, [MixedPrecision; 2]); 4] = [
        ("bf16", "off", [named(Amp::Bf16), named(Amp::Off)]),
        ("fp16", "bf16", [named(Amp::Fp16), named(Amp::Bf16)]),
        // Whatever has been measured, the other rank would measure something else on another day.
        ("auto", "bf16", [named(Amp::Auto), named(Amp::Bf16)]),
        ("bf16 with the plan", "bf16 with the plan", [plan("matmul"), plan("linear")]),
    ];
    for (first, second, precisions) in cases {
        let refused = ranks(2, |group| {
            let mut amp = precisions[group.rank()].clone();
            let error = amp.agree_over(&group).unwrap_err();
            assert_eq!(amp, precisions[group.rank()]);
            assert_open(&group);
            calls(error)
        });
        for calls in refused {
            for (call, name) in calls.iter().zip([first, second]) {
                let start = format!("agree_over of a MixedPrecision that is {name}");
                assert!(call.starts_with(&start), "{call} is not {start}");
            }
        }
    }
    // The same plan, and the same precision from a checkpoint of a rank that had measured it.
    let measured = named(Amp::Auto);
    let mut checkpoint = Checkpoint::new();
    checkpoint.add("amp", &measured).unwrap();
    let state: serde_json::Value = checkpoint.value("amp").unwrap();
    ranks(2, |group| {
        plan("matmul").agree_over(&group).unwrap();
        let mut amp = named(if group.rank() == 0 { Amp::Auto } else { Amp::Fp16 });
        let mut checkpoint = Checkpoint::new();
        checkpoint.add_value("amp", &state).unwrap();
        checkpoint.restore().add("amp", &mut amp).apply().unwrap();
        amp.agree_over(&group).unwrap();
        assert_eq!(amp.amp(), measured.amp());
    });
}

/// A loop that does not ask the ranks to agree.
#[test]
fn ranks_whose_regions_have_different_dtypes_do_not_average_their_gradients() {
    let (off, here) = (Autocast::new(Device::Cpu).enabled(false), Autocast::new(Device::Cpu));
    let (bf16, fp16) = (here.dtype(Kind::BFloat16), here.dtype(Kind::Half));
    let words = |region: &Autocast| match region {
        region if *region == bf16 => " after a forward pass in bf16",
        region if *region == fp16 => " after a forward pass in fp16",
        _ => "",
    };
    for (outside, pair) in [
        (false, [bf16, off]),
        (true, [bf16, off]),
        (false, [off, fp16]),
        (false, [bf16, fp16]),
        (true, [fp16, bf16]),
        (false, [bf16, bf16]),
        (true, [off, off]),
    ] {
        let results = ranks(2, |group| {
            let vs = VarStore::new(Device::Cpu);
            let net = nn::linear(vs.root(), 4, 1, Default::default());
            let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
            let xs = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
            let mut pass = |region: Autocast| {
                let model = || net.forward(&xs).square().mean(Kind::Float);
                let loss = match outside {
                    true => region.try_run(|| ddp.forward(model))?,
                    // A region that is off, such as for a part in f32, decides nothing.
                    false => ddp.forward(|| off.run(|| region.run(model)))???,
                };
                ddp.backward(&loss)
            };
            let first = pass(pair[group.rank()]).map_err(calls);
            if first.is_err() {
                assert!(!net.ws.grad().defined());
            }
            // The ranks can go on in one precision.
            pass(pair[0]).unwrap();
            first
        });
        let number = "the backward pass of DistributedDataParallel 0";
        let expected: Vec<_> =
            pair.iter().map(|region| format!("{number}{}", words(region))).collect();
        let expected = if expected[0] == expected[1] { Ok(()) } else { Err(expected) };
        assert_eq!(results, [expected.clone(), expected], "{pair:?}");
    }
}

/// An evaluation, of which ranks may have different numbers, says nothing about the passes that follow.
#[test]
fn the_dtype_of_an_evaluation_is_not_that_of_the_next_backward_pass() {
    let (off, bf16) = (Autocast::new(Device::Cpu).enabled(false), Autocast::new(Device::Cpu));
    let results = ranks(2, |group| {
        let vs = VarStore::new(Device::Cpu);
        let net = nn::linear(vs.root(), 4, 1, Default::default());
        let mut ddp = DistributedDataParallel::new(&group, &vs).unwrap();
        let xs = Tensor::ones([2, 4], (Kind::Float, Device::Cpu));
        let model = || net.forward(&xs).square().mean(Kind::Float);
        if group.rank() == 0 {
            let evaluated = tch::no_grad(|| ddp.forward(|| bf16.run(model))).unwrap().unwrap();
            assert!(!evaluated.requires_grad());
        }
        let loss = ddp.forward(|| off.run(model)).unwrap().unwrap();
        ddp.backward(&loss).map_err(calls)
    });
    assert_eq!(results, [Ok(()), Ok(())]);
}
