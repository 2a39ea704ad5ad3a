//! The eighth step of the tutorial: a soft actor-critic, whose loss is written by hand.
//!
//! `cargo run --example tutorial_8_actor_critic`

use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};
use tch_amp::autocast::LOG_PROBABILITIES;
use tch_amp::optim::{Adam, Optimizer};
use tch_amp::{Amp, Result};

/// The parameters whose names begin with `part`, with an optimizer of their own.
fn optimizer(vs: &nn::VarStore, part: &str) -> Result<Optimizer> {
    let of_part: Vec<_> =
        vs.variables().into_iter().filter(|(name, _)| name.starts_with(part)).collect();
    Adam::default().build(of_part, 3e-3)
}

/// Trains an actor and a critic.
pub fn main() -> Result<()> {
    let device = Device::cuda_if_available();
    let amp = Amp::Bf16.on(device)?;
    let region = amp.region().keep_in_f32(LOG_PROBABILITIES);
    tch::manual_seed(1);
    let vs = nn::VarStore::new(device);
    let actor = nn::linear(vs.root() / "actor", 4, 2, Default::default());
    let critic = nn::seq()
        .add(nn::linear(vs.root() / "critic" / "0", 5, 32, Default::default()))
        .add_fn(|xs| xs.relu())
        .add(nn::linear(vs.root() / "critic" / "1", 32, 1, Default::default()));
    let (mut actor_opt, mut critic_opt) = (optimizer(&vs, "actor")?, optimizer(&vs, "critic")?);
    let mut scaler = amp.scaler()?;

    // An action for each state, and its log-probability.
    let act = |states: &Tensor| {
        let outputs = actor.forward(states).chunk(2, -1);
        let (mean, log_std) = (&outputs[0], outputs[1].clamp(-5.0, 2.0));
        let noise = mean.randn_like();
        let x = mean + log_std.exp() * &noise;
        let gaussian = noise.square() * -0.5 - log_std - 0.5 * std::f64::consts::TAU.ln();
        let squashing = (1i64 - x.tanh().square() + 1e-6).log();
        (x.tanh(), gaussian - squashing)
    };
    let value =
        |states: &Tensor, actions: &Tensor| critic.forward(&Tensor::cat(&[states, actions], -1));

    for _ in 0..20 {
        let states = Tensor::randn([64, 4], (Kind::Float, device));
        // The reward of an action is its distance from the first number of the state, negated.
        critic_opt.zero_grad()?; // the actor's loss has left gradients in the critic
        let critic_loss = region.run(|| {
            let (actions, _) = tch::no_grad(|| act(&states));
            let rewards = -(&actions - states.narrow(1, 0, 1)).abs();
            value(&states, &actions).mse_loss(&rewards, tch::Reduction::Mean)
        })?;
        scaler.backward(&critic_loss)?;
        scaler.step(&mut critic_opt)?;

        actor_opt.zero_grad()?;
        let actor_loss = region.run(|| {
            let (actions, log_probability) = act(&states);
            (log_probability * 0.1 - value(&states, &actions)).mean(Kind::Float)
        })?;
        scaler.backward(&actor_loss)?;
        scaler.step(&mut actor_opt)?;
        scaler.update()?; // once, after the last step
        assert!(actor_loss.double_value(&[]).is_finite());
    }
    Ok(())
}
