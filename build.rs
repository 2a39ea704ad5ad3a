//! Compiles `csrc/` against the libtorch that torch-sys found and links it into whatever depends on this crate.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::{env, fs, io};

use anyhow::{Context, Result, ensure};

/// Without these, the loops in csrc/kernels do not become vector code, and round differently from libtorch's.
const FLAGS: [&str; 4] =
    ["-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"];

fn main() {
    let hooks = if testing() { "cargo:rustc-cfg=tamp_testing" } else { "" };
    println!("cargo:rustc-check-cfg=cfg(tamp_testing)\n{hooks}\ncargo:rerun-if-changed=csrc");
    if let Err(error) = if enabled("doc-only") { Ok(()) } else { build() } {
        eprintln!("\ntch-amp: {error:#}\n");
        std::process::exit(1);
    }
}

fn build() -> Result<()> {
    let lib = env::var("DEP_TCH_LIBTORCH_LIB")
        .context("torch-sys says where libtorch is on Linux and macOS only; this crate needs it")?;
    let include = match variable("LIBTORCH_INCLUDE") {
        Some(root) if variable("LIBTORCH_USE_PYTORCH").is_none() => root + "/include",
        _ => format!("{lib}/../include"),
    };
    let version = version(&include).with_context(|| {
        format!("no headers of libtorch in {include}: LIBTORCH_INCLUDE can say where they are")
    })?;
    // The range of `tch` in Cargo.toml pairs with these.
    ensure!(
        ["2.11", "2.12", "2.13"].contains(&&*version)
            || variable("LIBTORCH_BYPASS_VERSION_CHECK").is_some(),
        "libtorch {version} is not supported (2.11 to 2.13 are). Set LIBTORCH to a libtorch of the \
         version that your tch wants, or LIBTORCH_BYPASS_VERSION_CHECK=1 to try"
    );
    println!("cargo:rustc-env=TAMP_LIBTORCH={version}"); // autocast's lists differ between versions
    let cuda = Path::new(&lib).join("libtorch_cuda.so").exists();
    let out = env::var("OUT_DIR")?;
    compile(compiler(&include, cuda), &version, Path::new(&out)).context(
        "cannot compile csrc/. If there is no C++ compiler, install g++ or clang++, or set CXX to one. If errors are \
         in libtorch's headers, the compiler lacks C++17 or LIBTORCH_INCLUDE belongs to another libtorch",
    )?;
    println!("cargo:rustc-link-search=native={out}\ncargo:rustc-link-search=native={lib}");
    // Whole, or the object that keeps libtorch_cuda linked would be left out (see csrc/border/device.cpp).
    println!("cargo:rustc-link-lib=static:+whole-archive=tamp");
    let stdlib = if cfg!(target_os = "macos") { "c++" } else { "stdc++" };
    for library in cuda.then_some("torch_cuda").into_iter().chain(["torch_cpu", "c10", stdlib]) {
        println!("cargo:rustc-link-lib={library}");
    }
    // Tests and examples of this crate find libtorch without LD_LIBRARY_PATH.
    println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}\ncargo:libtorch_lib={lib}");
    Ok(())
}

fn compiler(include: &str, cuda: bool) -> cc::Build {
    let mut compiler = cc::Build::new();
    compiler.cpp(true).std("c++17").opt_level(3).debug(false).pic(true).cargo_metadata(false);
    compiler.warnings(true).extra_warnings(true).flags(FLAGS);
    compiler.warnings_into_errors(variable("TCH_AMP_DENY_WARNINGS").is_some());
    // g++ warns of lambdas in a source that a unit includes, and of a size that it cannot see in libtorch's pointers.
    compiler.flag_if_supported("-Wno-subobject-linkage");
    compiler.flag_if_supported("-Wno-stringop-overflow");
    let abi = variable("LIBTORCH_CXX11_ABI").unwrap_or_else(|| "1".to_owned());
    compiler.define("_GLIBCXX_USE_CXX11_ABI", &*abi);
    // System headers: their warnings are not ours. A libtorch that has gloo's headers takes its own.
    let api = format!("{include}/torch/csrc/api/include");
    let folders = [include, &api, "csrc/distributed/gloo_headers"];
    compiler.flags(folders.map(|folder| format!("-isystem{folder}")));
    compiler.flags(["-iquote.", "-iquotecsrc"]); // not -I: a system header may have one's name
    let defined = [(cuda, "CUDA"), (enabled("insight"), "INSIGHT"), (testing(), "TESTING")];
    for (_, name) in defined.into_iter().filter(|(defined, _)| *defined) {
        compiler.define(&format!("TAMP_WITH_{name}"), None);
    }
    if let Some(flags) = variable("TCH_AMP_SANITIZE") {
        compiler.debug(true).opt_level(1).flags(flags.split_whitespace());
        println!("cargo:rustc-link-lib=asan\ncargo:rustc-link-lib=ubsan");
    }
    compiler
}

/// The folders of `csrc/` that are compiled together, because libtorch's headers take longer than any source, beside
/// that of each enabled feature. Two cores share a first build, and a change of an optimizer compiles one unit.
const UNITS: [&[&str]; 3] = [
    &["autocast", "border", "function", "gradients", "graph", "lean", "saved_tensors", "scale"],
    &["optim"],
    &["kernels"],
];

/// Compiles the units. Only a change of its sources, a header, libtorch's version or an option compiles one again.
fn compile(mut compiler: cc::Build, version: &str, out: &Path) -> Result<()> {
    let features = [["insight"], ["distributed"], ["jit"]];
    let features = features.iter().filter(|[name]| enabled(name)).map(|name| &name[..]);
    let units = UNITS.into_iter().chain(features);
    let headers = units.clone().map(|folders| files(folders, "h")).collect::<Result<Vec<_>>>()?;
    let options = format!("{version} {:?}", compiler.try_get_compiler()?.to_command());
    let (mut objects, mut new) = (Vec::new(), Vec::new());
    for folders in units {
        let sources = files(folders, "cpp")?;
        let mut hasher = DefaultHasher::new();
        (&sources, &headers, &options).hash(&mut hasher);
        let object = out.join(format!("unit-{:016x}.o", hasher.finish()));
        if !object.exists() {
            let source = object.with_extension("cpp");
            let lines = sources.iter().map(|(path, _)| format!("#include {path:?}\n"));
            fs::write(&source, lines.collect::<String>())?;
            compiler.file(source);
            new.push(object.clone());
        }
        objects.push(object);
    }
    for (compiled, object) in compiler.try_compile_intermediates()?.into_iter().zip(new) {
        fs::rename(compiled, object)?;
    }
    Ok(cc::Build::new().cpp(true).cargo_metadata(false).objects(objects).try_compile("tamp")?)
}

/// The paths and texts of the files of a kind in folders of `csrc/`.
fn files(folders: &[&str], kind: &str) -> Result<Vec<(PathBuf, String)>> {
    let folders = folders.iter().map(|folder| fs::read_dir(Path::new("csrc").join(folder)));
    let entries = folders.collect::<io::Result<Vec<_>>>()?.into_iter().flatten();
    let paths = entries.map(|entry| Ok(entry?.path())).collect::<io::Result<BTreeSet<_>>>()?;
    let paths = paths.into_iter().filter(|path| path.extension().is_some_and(|end| end == kind));
    paths.map(|path| Ok((path.clone(), fs::read_to_string(path)?))).collect()
}

/// The version in libtorch's version.h, without the patch: `2.13`.
fn version(include: &str) -> Option<String> {
    let read = |folder| fs::read_to_string(format!("{include}/{folder}/version.h")).ok();
    let header = ["torch/headeronly", "torch/csrc/api/include/torch"].iter().find_map(read)?;
    let number = |part: &str| {
        let name = format!("#define TORCH_VERSION_{part} ");
        header.lines().find_map(|line| line.strip_prefix(&*name)).map(str::trim)
    };
    Some(format!("{}.{}", number("MAJOR")?, number("MINOR")?))
}

/// Whether there are hooks for this crate's own tests, as `.cargo/config.toml` asks, and not for users or benchmarks.
fn testing() -> bool {
    variable("TCH_AMP_TESTING").is_some() && variable("PROFILE").as_deref() == Some("debug")
}

fn enabled(feature: &str) -> bool {
    env::var_os(format!("CARGO_FEATURE_{}", feature.to_uppercase().replace('-', "_"))).is_some()
}

fn variable(name: &str) -> Option<String> {
    println!("cargo:rerun-if-env-changed={name}");
    env::var(name).ok()
}
