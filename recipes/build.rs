//! Lets the programs find libtorch without LD_LIBRARY_PATH, where it was when they were linked.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    // tch-amp says where it is, unless only the documentation is built.
    if let Ok(lib) = std::env::var("DEP_TCH_AMP_LIBTORCH_LIB") {
        println!("cargo:rustc-link-arg=-Wl,-rpath,{lib}");
    }
}
