//! Links, permissions and names that exist only on Unix.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, symlink};

use super::files::{refused, write};
use super::{Folder, replaced};
use crate::atomic::place::is_temporary;
use crate::atomic::{Target, replace};

#[test]
fn a_link_is_preserved_and_its_file_is_replaced() {
    let folder = Folder::new("links");
    fs::create_dir(folder.join("data")).unwrap();
    fs::write(folder.join("data/real"), "old").unwrap();
    symlink("data/real", folder.join("first")).unwrap();
    symlink(folder.join("first"), folder.join("second")).unwrap();
    symlink("data/new", folder.join("dangling")).unwrap();
    replaced(write(&folder.join("second"), "new"));
    replaced(write(&folder.join("dangling"), "newer"));
    assert_eq!(fs::read(folder.join("data/real")).unwrap(), b"new");
    assert_eq!(fs::read(folder.join("data/new")).unwrap(), b"newer");
    for link in ["first", "second", "dangling"] {
        assert!(fs::symlink_metadata(folder.join(link)).unwrap().is_symlink());
    }
    symlink("loop", folder.join("loop")).unwrap();
    assert_eq!(refused(&folder.join("loop")).1, "too many symbolic links");
}

#[test]
fn the_permissions_are_preserved() {
    let folder = Folder::new("permissions");
    let path = folder.join("model.bin");
    fs::write(&path, "old").unwrap();
    for mode in [0o600, 0o640, 0o666, 0o751] {
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        let mut fill = |target: &mut dyn Target| {
            // The temporary file has the permissions before anything is written to it.
            let temporary = folder.names().into_iter().find(|name| name.starts_with('.'));
            let temporary = fs::metadata(folder.join(&temporary.unwrap())).unwrap();
            assert_eq!(temporary.permissions().mode() & 0o7777, mode);
            target.write_all(b"new")
        };
        replaced(replace(&path, &mut fill));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o7777, mode);
    }
}

#[test]
fn a_name_need_not_be_unicode() {
    let folder = Folder::new("bytes");
    let path = folder.0.join(OsStr::from_bytes(b"model\xff.bin"));
    replaced(write(&path, "new"));
    assert_eq!(fs::read(&path).unwrap(), b"new");
    assert!(!is_temporary(path.file_name().unwrap()));
}
