//! A window of micro-batches, saved as a dict of its gradients by parameter with the place in the window.

use tch::{Kind, Tensor};

use crate::accumulation::{Loaded, WithGradients};
use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::error::Result;
use crate::ffi;

/// The name of what is not a gradient.
const WINDOW: &str = "window";

impl Stateful for WithGradients<'_> {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.value(WINDOW, &self.progress()?)?;
        for (name, parameter) in self.parameters()? {
            let gradient = parameter.f_grad()?;
            if gradient.defined() {
                state.tensor(name, &gradient)?;
            }
        }
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let mut gradients = Vec::new();
        let parameters = self.parameters()?;
        for (name, parameter) in &parameters {
            gradients.push(match saved.kind(name)? {
                Some(kind) if !saved.options.names.skips(name) => Some(empty(parameter, kind)?),
                _ => None,
            });
        }
        let names = parameters.iter().map(|(name, _)| name);
        let pairs = names.zip(&gradients).filter_map(|(name, to)| Some((name, to.as_ref()?)));
        let copies = saved.copy(pairs, "in the model")?;
        let loaded = Loaded::new(saved.value(WINDOW)?, gradients)?;
        Ok(copies.and(Prepared::step(move || self.resume(loaded))))
    }
}

/// Returns memory for a gradient that was saved in a dtype. It is the parameter's, except for the f32 gradients that
/// parameters in half precision can have.
fn empty(parameter: &Tensor, saved: Kind) -> Result<Tensor> {
    let kind = match (parameter.f_kind()?, saved) {
        (Kind::Half | Kind::BFloat16, Kind::Float) => Kind::Float,
        (kind, _) => kind,
    };
    let size = ffi::sizes(parameter)?;
    Ok(Tensor::f_empty(size, (kind, parameter.device()))?)
}
