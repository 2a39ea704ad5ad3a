//! Regions with a plan: rules are looked up, and attention is composed, without synchronizing.

use tch::{Device, Kind, Tensor};
use tch_amp::Autocast;
use tch_amp::autocast::{Plan, Rule, RunAs};

use testkit::simulation::Simulation;

#[test]
fn an_iteration_with_a_plan_does_not_synchronize() {
    let Some(simulation) = Simulation::find() else { return };
    let composed = RunAs::Composed { most_bytes: 1 << 20 };
    for index in 0..2 {
        let device = Device::Cuda(index);
        let rules = vec![
            Rule { below: Some(100), ..Rule::new("matmul", RunAs::F32) },
            Rule { at_least: 100, ..Rule::new("matmul", RunAs::Half) },
            Rule::new("softmax", RunAs::Half),
            Rule::new("scaled_dot_product_attention", composed),
        ];
        let plan = Plan { dtype: Some(Kind::BFloat16), rules, ..Plan::new(device).unwrap() };
        let region = Autocast::new(device).plan(&plan).unwrap();
        let x = Tensor::randn([2, 4, 8, 8], (Kind::Float, device)).set_requires_grad(true);
        let booleans = Tensor::ones([2, 1, 8, 8], (Kind::Bool, device)).tril(0);
        let numbers = Tensor::zeros([8, 8], (Kind::Float, device));
        let kinds = [Kind::BFloat16, Kind::Float, Kind::BFloat16];
        let iterate = || {
            let loss = region.run(|| {
                let heads = |mask: Option<&Tensor>, dropout, causal, grouped| {
                    Tensor::scaled_dot_product_attention(
                        &x, &x, &x, mask, dropout, causal, None, grouped,
                    )
                };
                let sum = heads(None, 0.0, true, false)
                    + heads(Some(&booleans), 0.1, false, false)
                    + heads(Some(&numbers), 0.0, false, true);
                let small = x.select(0, 0).select(0, 0).narrow(0, 0, 2);
                let found = [
                    sum.matmul(&x),
                    small.matmul(&small.transpose(0, 1)),
                    x.softmax(-1, None::<Kind>),
                ];
                assert_eq!(found.each_ref().map(Tensor::kind), kinds);
                found.map(|result| result.sum(Kind::Float)).into_iter().sum::<Tensor>()
            });
            loss.unwrap().backward();
        };
        iterate();
        let ((), counts) = simulation.count(iterate);
        assert_eq!(counts.host_syncs, 0, "{counts:?}");
    }
}
