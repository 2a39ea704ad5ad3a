//! Finds libtorch: the one that the user has set, or the one in the environment in the cache folder.

use std::env;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, anyhow, bail, ensure};
pub(crate) use testbench::libtorch::{Libtorch, Rule, without_build};

use crate::venv::Venv;
use crate::versions::Pair;
use crate::{oracle, process, release};

/// The result of a search. `Absent` holds the environment that would have to be created.
#[derive(Debug)]
pub(crate) enum Search {
    Found(Libtorch),
    Absent(Venv),
}

/// Searches the libtorch of `pair` without creating anything.
///
/// A libtorch that the user has set must fit the `locked` pair. For other pairs it is ignored, because one variable
/// cannot name two libtorches.
pub(crate) fn search(pair: Pair, locked: Pair) -> Result<Search> {
    if let Some(found) = set_by_user(pair)? {
        let bypass = env::var_os("LIBTORCH_BYPASS_VERSION_CHECK").is_some();
        if without_build(&found.version) == pair.libtorch || (bypass && pair == locked) {
            return Ok(Search::Found(found));
        }
        ensure!(
            pair != locked,
            "{}, which leads to libtorch {} in {}, but tch {} needs {}: set it to that one, or \
             unset it to have that one downloaded",
            found.rule.reason(),
            found.version,
            found.root.display(),
            pair.tch,
            pair.libtorch,
        );
    }
    let venv = Venv::torch(pair.libtorch)?;
    if venv.is_usable() { of_venv(&venv).map(Search::Found) } else { Ok(Search::Absent(venv)) }
}

/// Finds the libtorch of `pair`, or creates the environment that contains it.
pub(crate) fn provide(pair: Pair, locked: Pair) -> Result<Libtorch> {
    match search(pair, locked)? {
        Search::Found(libtorch) => {
            if libtorch.rule == Rule::Cache {
                // Marks an environment that was created in another way.
                Venv::torch(pair.libtorch)?.ensure()?;
            }
            Ok(libtorch)
        }
        Search::Absent(venv) => {
            venv.ensure().map_err(|error| {
                anyhow!("{error:#}\nOr set LIBTORCH to a libtorch {}.", pair.libtorch)
            })?;
            of_venv(&venv)
        }
    }
}

fn of_venv(venv: &Venv) -> Result<Libtorch> {
    let root = venv.package_dir()?;
    let version = release::of(&root)?;
    let python = Some(venv.program("python"));
    Ok(Libtorch { root, version, rule: Rule::Cache, python })
}

/// Checks the variables in the order of torch-sys.
fn set_by_user(pair: Pair) -> Result<Option<Libtorch>> {
    if env::var_os("LIBTORCH_USE_PYTORCH").is_some() {
        return of_python(pair.libtorch).map(Some);
    }
    let Some(root) = env::var_os("LIBTORCH").map(PathBuf::from) else {
        return Ok(None);
    };
    let version = release::of(&root)?;
    let python = oracle::find(&root, without_build(&version));
    let libtorch = Libtorch { root, version, rule: Rule::Libtorch, python };
    let library = format!("{}torch_cpu{}", env::consts::DLL_PREFIX, env::consts::DLL_SUFFIX);
    let path = libtorch.lib().join(library);
    ensure!(path.exists(), "LIBTORCH is set, but there is no {}", path.display());
    Ok(Some(libtorch))
}

/// The torch of the Python that torch-sys would run.
fn of_python(release: &str) -> Result<Libtorch> {
    let python = if env::var_os("VIRTUAL_ENV").is_some() { "python" } else { "python3" };
    let code = "import sys, os, torch\n\
                print(os.path.dirname(torch.__file__), torch.__version__, sys.executable, sep='\\n')";
    let printed = process::read(Command::new(python).args(["-c", code])).map_err(|error| {
        let reason = format!("{error:#}");
        let reason = reason.lines().last().unwrap_or_default();
        anyhow!(
            "LIBTORCH_USE_PYTORCH is set, but {python} cannot import torch ({reason}): \
             install it there with `{python} -m pip install torch=={release}`, or unset this"
        )
    })?;
    let [root, version, executable] = printed.lines().collect::<Vec<_>>()[..] else {
        bail!("{python} prints more than asked when torch is imported: {printed}");
    };
    Ok(Libtorch {
        root: root.into(),
        version: version.to_owned(),
        rule: Rule::UsePytorch,
        python: Some(executable.into()),
    })
}
