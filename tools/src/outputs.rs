//! What a command writes beside its targets: standard output, standard error, and files that options name. None of these may be a target.
//!
//! A shell opens these before the command begins (`verify v --json 1<>v`), so no lock keeps the report from overwriting the blocks that it
//! is about. Identities are compared, and not names: a hard link or a loop device is the same file.

use std::fs::{self, Metadata};
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

use sealblock_stack::filesystem::FilesystemName;
use sealblock_stack::kernel::leaves::{Leaf, leaves_at, leaves_of};
use sealblock_stack::target::TargetName;
use sealblock_stack::{Cause, StackError, TargetIdentity};

use crate::cli::{Command, Endpoint, FsCommand, FsSubvolumeCommand, MirrorCommand, ScrubCommand, ServedName};

/// Refuses to write to a target anything but its blocks.
///
/// # Errors
/// When an output is, or has bytes of, a target of the command. The failure is reported here where standard error is one.
pub fn check(command: &Command) -> Result<(), StackError> {
    let (doing, targets) = targets_of(command);
    // The data of a copy go to standard output only for `-`, and nothing else does without --json.
    let writes_output = !matches!(command, Command::Copy(copy) if !copy.json && copy.to != Endpoint::Standard);
    check_streams(doing, &targets, writes_output)?;
    let file = match command {
        Command::Verify(verify) => verify.resume.as_deref(),
        Command::Fs(fs) => match &fs.command {
            FsCommand::Get(get) => Some(get.to.as_path()),
            FsCommand::Rescue(rescue) => Some(rescue.to.as_path()),
            _ => None,
        },
        _ => None,
    };
    let Some(path) = file.filter(|path| path.exists() && !path.is_dir()) else { return Ok(()) };
    match shared(&targets, &leaves_at(path).unwrap_or_default()) {
        Some(target) => Err(refused(doing, &path.display().to_string(), target)),
        None => Ok(()),
    }
}

/// The same of the standard streams alone, for targets that a configuration names.
///
/// # Errors
/// As [`check`].
pub fn check_streams(doing: &str, targets: &[TargetName], writes_output: bool) -> Result<(), StackError> {
    let [output, errors] = ["/dev/fd/1", "/dev/fd/2"].map(|path| stream(Path::new(path)));
    if let Some(target) = shared(targets, &errors) {
        let failure = refused(doing, "standard error", target).reported();
        if shared(targets, &output).is_none() {
            // Where it is closed, too, the exit status has to do.
            writeln!(io::stdout(), "{failure}").ok();
        }
        return Err(failure);
    }
    match shared(targets, &output) {
        Some(target) if writes_output => Err(refused(doing, "standard output", target)),
        _ => Ok(()),
    }
}

fn refused(doing: &str, output: &str, target: &TargetName) -> StackError {
    let why = format!("{output} and {target} are the same device or file");
    StackError::new(Cause::Refused, doing, why).advise("write the output to another file")
}

/// The bytes of a stream that is a file or a block device. Writing to a terminal, pipe or `/dev/null` changes no block.
fn stream(path: &Path) -> Vec<Leaf> {
    let is_stored = |about: &Metadata| about.is_file() || about.file_type().is_block_device();
    let about = fs::metadata(path).ok().filter(is_stored);
    about.and_then(|about| leaves_of(&about).ok()).unwrap_or_default()
}

/// The first target that has some of these bytes.
fn shared<'a>(targets: &'a [TargetName], written: &[Leaf]) -> Option<&'a TargetName> {
    if written.is_empty() {
        return None;
    }
    targets.iter().find(|target| {
        TargetIdentity::of(target).leaves().iter().any(|leaf| written.iter().any(|other| leaf.overlaps(other)))
    })
}

/// The targets that a command line names, and the verb of its failures.
fn targets_of(command: &Command) -> (&'static str, Vec<TargetName>) {
    let end = |endpoint: &Endpoint| match endpoint {
        Endpoint::Target(target) => Some(target.clone()),
        Endpoint::Standard => None,
    };
    match command {
        Command::Create(create) => ("create", vec![create.volume.target()]),
        Command::Info(info) => ("describe", vec![info.target.clone()]),
        Command::Serve(serve) => ("serve", serve.targets.clone()),
        Command::Attach(attach) => ("attach", vec![attach.target.clone()]),
        Command::Scrub(scrub) => {
            let what = match &scrub.command {
                ScrubCommand::Status(status) => &status.what,
                ScrubCommand::Start(start) => &start.what,
                ScrubCommand::Pause(what) | ScrubCommand::Stop(what) => what,
            };
            ("scrub", named(&what.target))
        }
        Command::Verify(verify) => ("verify", verify.targets.clone()),
        Command::Compare(compare) => {
            ("compare", [&compare.a, &compare.b, &compare.zero].into_iter().flatten().cloned().collect())
        }
        Command::Zero(zero) => ("zero", vec![zero.target.clone()]),
        Command::Discard(discard) => ("discard", vec![discard.target.clone()]),
        Command::Copy(copy) => ("copy", [&copy.from, &copy.to].into_iter().filter_map(end).collect()),
        Command::Rescue(rescue) => {
            ("rescue", [Some(rescue.volume.target()), end(&rescue.to)].into_iter().flatten().collect())
        }
        Command::Resize(resize) => ("resize", named(&resize.target)),
        Command::Mirror(mirror) => ("use", members_of(&mirror.command)),
        Command::Fs(fs) => {
            let doing = match &fs.command {
                FsCommand::Format(_) => "format",
                FsCommand::Bench(_) => "start",
                command if changes(command) => "write to",
                _ => "read",
            };
            (doing, filesystems_of(&fs.command))
        }
        Command::Corrupt(corrupt) => ("corrupt", vec![corrupt.volume.target()]),
        Command::Detach(_)
        | Command::Status(_)
        | Command::Log(_)
        | Command::Discover(_)
        | Command::Demo(_)
        | Command::Bench(_)
        | Command::Completions(_)
        | Command::Complete(_)
        | Command::Man(_) => ("start", Vec::new()),
    }
}

fn named(name: &ServedName) -> Vec<TargetName> {
    match name {
        ServedName::Target(target) => vec![target.clone()],
        ServedName::Subsystem(..) => Vec::new(),
    }
}

fn members_of(command: &MirrorCommand) -> Vec<TargetName> {
    match command {
        MirrorCommand::Status(status) => vec![status.target.clone()],
        MirrorCommand::Create(create) => create.replicas.clone(),
        MirrorCommand::Add(add) => vec![add.target.clone(), add.replica.clone()],
        MirrorCommand::Remove(remove) => vec![remove.target.clone(), remove.replica.clone()],
        MirrorCommand::AcceptStale(accept) => vec![accept.target.clone(), accept.replica.clone()],
        MirrorCommand::Replace(replace) => {
            [Some(&replace.target), Some(&replace.old), replace.new.as_ref()].into_iter().flatten().cloned().collect()
        }
    }
}

/// Whether it changes the filesystem that it names.
fn changes(command: &FsCommand) -> bool {
    match command {
        FsCommand::Put(_)
        | FsCommand::Mkdir(_)
        | FsCommand::Rm(_)
        | FsCommand::Rmdir(_)
        | FsCommand::Mv(_)
        | FsCommand::Ln(_)
        | FsCommand::Chmod(_)
        | FsCommand::Chown(_)
        | FsCommand::Datasum(_)
        | FsCommand::Fallocate(_)
        | FsCommand::Snapshot(_) => true,
        FsCommand::Mount(mount) => mount.options.writes,
        FsCommand::Verify(verify) => verify.repair || verify.reseal || verify.forget_tags,
        FsCommand::Subvolume(subvolume) => !matches!(subvolume.command, FsSubvolumeCommand::List(_)),
        _ => false,
    }
}

fn filesystems_of(command: &FsCommand) -> Vec<TargetName> {
    let one = std::slice::from_ref::<FilesystemName>;
    let places = match command {
        FsCommand::Format(format) => return format.targets.clone(),
        // It makes its own.
        FsCommand::Bench(_) => return Vec::new(),
        FsCommand::Info(info) => one(&info.filesystem),
        FsCommand::Ls(ls) => one(&ls.place),
        FsCommand::Cat(cat) => &cat.files,
        FsCommand::Get(get) => one(&get.place),
        FsCommand::Verify(verify) => one(&verify.place),
        FsCommand::Check(check) => one(&check.filesystem),
        FsCommand::Rescue(rescue) => one(&rescue.place),
        FsCommand::Mount(mount) => one(&mount.place),
        FsCommand::Tree(tree) => one(&tree.filesystem),
        FsCommand::Put(put) => one(&put.to),
        FsCommand::Mkdir(mkdir) => &mkdir.names,
        FsCommand::Rm(rm) => &rm.names,
        FsCommand::Rmdir(rmdir) => &rmdir.names,
        // All names are in one filesystem.
        FsCommand::Mv(mv) => one(&mv.from),
        FsCommand::Ln(ln) => one(&ln.name),
        FsCommand::Chmod(chmod) => &chmod.names,
        FsCommand::Chown(chown) => &chown.names,
        FsCommand::Datasum(datasum) => &datasum.names,
        FsCommand::Fallocate(fallocate) => one(&fallocate.name),
        FsCommand::Snapshot(snapshot) => one(&snapshot.to),
        FsCommand::Subvolume(subvolume) => match &subvolume.command {
            FsSubvolumeCommand::Create(create) => &create.names,
            FsSubvolumeCommand::Delete(delete) => &delete.names,
            FsSubvolumeCommand::List(list) => one(&list.filesystem),
        },
    };
    places.iter().flat_map(|place| place.targets.clone()).collect()
}
