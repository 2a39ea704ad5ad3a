//! A window of micro-batches, saved as a dict of its gradients by parameter with the place in the window.

use tch::{Kind, Tensor};

use crate::accumulation::{Loaded, WithGradients};
use crate::checkpoint::stateful::{Prepared, SaveState, SavedState, Stateful};
use crate::error::Result;
use crate::ffi;
use crate::variables::Variable;

/// The name of what is not a gradient.
const WINDOW: &str = "window";

impl Stateful for WithGradients<'_> {
    fn save_state(&mut self, state: &mut SaveState<'_>) -> Result<()> {
        state.value(WINDOW, &self.progress()?)?;
        for Variable { names, tensor } in self.parameters()? {
            let gradient = tensor.f_grad()?;
            if gradient.defined() {
                state.tensors(names.iter().map(|name| (name, &gradient)))?;
            }
        }
        Ok(())
    }

    fn prepare_restore<'a>(&'a mut self, saved: &SavedState<'a>) -> Result<Prepared<'a>> {
        let (mut gradients, mut targets) = (Vec::new(), Vec::new());
        for Variable { names, tensor } in self.parameters()? {
            let kinds: Vec<_> = names.iter().map(|name| saved.kind(name)).collect::<Result<_>>()?;
            let Some(kind) = kinds.into_iter().flatten().next() else {
                gradients.push(None);
                continue;
            };
            let is_skipped = names.iter().any(|name| saved.options.names.skips(name));
            // One that is skipped is not copied, and needs no memory.
            let to = if is_skipped { tensor } else { empty(&tensor, kind)? };
            gradients.push((!is_skipped).then(|| to.shallow_clone()));
            targets.extend(names.iter().map(|name| (name.clone(), to.shallow_clone())));
        }
        let pairs = targets.iter().map(|(name, to)| (name, to));
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
