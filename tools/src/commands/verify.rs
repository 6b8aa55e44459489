//! `sealblock verify`: checks every block and names the bad ones.

mod catch_up;
mod files;
mod job;
mod lineage;
mod pace;
mod pieces;
pub mod record;
mod resume;
mod session;
mod several;
mod target;
mod text;
mod workers;

use sealblock_stack::target::{GroupKind, TargetName};
use sealblock_stack::{Cause, StackError};

use crate::cli::Verify;
use crate::exit::Exit;
use job::VerifyRequest;

/// Checks the targets.
pub fn run(arguments: &Verify) -> Result<Exit, StackError> {
    if arguments.accept_lost
        && let Some(target) = arguments.targets.iter().find(|target| is_kept_elsewhere(target))
    {
        let why = "--accept-lost is for volumes of this machine: a server tells its own hosts that writes may be lost";
        return Err(StackError::new(Cause::Usage, "verify", why).on(target).advise("omit --accept-lost"));
    }
    match &arguments.targets[..] {
        [target] => target::run(VerifyRequest { arguments, target }),
        _ => several::run(arguments),
    }
}

/// True if only servers know what of this target may be lost. A mirror that is put together here has it in its labels.
fn is_kept_elsewhere(target: &TargetName) -> bool {
    match target {
        TargetName::NvmeTcp { .. } | TargetName::Nbd { .. } => true,
        TargetName::Group { kind: GroupKind::Mirror, .. } => false,
        _ => !target.inner().is_empty() && target.inner().iter().all(is_kept_elsewhere),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use sealblock_block::{Device, Durability, Request};
    use sealblock_integrity::{Sealed, Tags};
    use sealblock_runtime_memory::Slice;
    use sealblock_units::Extent;

    use crate::cli::{Cli, Command};
    use sealblock_stack::{Access, on_reactor, open};

    #[test]
    fn what_servers_keep_is_theirs_and_labels_of_a_mirror_are_kept_here() {
        let is_elsewhere = |target: &str| is_kept_elsewhere(&target.parse().unwrap());
        for target in [
            "nbd://h/v",
            "nvme+tcp://h/nqn.2026-11.org.example:v",
            "offset:0..1,nbd://h/v",
            "multipath:nbd://h/v,nbd://i/v",
        ] {
            assert!(is_elsewhere(target), "{target}");
        }
        for target in ["v", "offset:0..1,v", "mirror:nbd://h/v,nbd://i/v", "stripe:v,nbd://h/v"] {
            assert!(!is_elsewhere(target), "{target}");
        }
    }

    fn verified(path: &str) -> Exit {
        let cli = Cli::try_parse_from(["sealblock", "verify", path, "--quiet"]).unwrap();
        let Command::Verify(arguments) = cli.command else { panic!("it is a verify") };
        run(&arguments).unwrap()
    }

    #[test]
    fn reference_tags_that_a_host_chose_are_clean_and_one_that_was_spoilt_is_damage() {
        for kind in ["1", "2", "3"] {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("v").to_str().unwrap().to_owned();
            let run_of = |line: &str| {
                let cli = Cli::try_parse_from(line.split(' ')).unwrap();
                match cli.command {
                    Command::Create(create) => crate::commands::create::run(&create),
                    Command::Corrupt(corrupt) => crate::commands::corrupt::run(&corrupt),
                    _ => panic!("{line}"),
                }
                .unwrap()
            };
            run_of(&format!("sealblock create {path} --size 1MiB --type {kind}"));
            on_reactor(async {
                let opened = open(&path.parse().unwrap(), Access::Write).await?;
                let (size, format) = (opened.device.geometry().block_size, opened.device.geometry().protection);
                let extent = Extent::from_raw(8, 4).unwrap();
                // As an ILBRT of the host's own; Type 1 has none but the address.
                let tags = Tags { initial_ref_tag: if kind == "1" { 8 } else { 0x7777 }, ..Tags::default() };
                let data = Sealed::seal(Slice::copy_from(&[7; 4 * 4096]), size, format, &tags);
                let durability = Durability::ForceUnitAccess;
                opened.device.execute(Request::write(extent, data, durability)).await.unwrap();
                opened.close(Ok(())).await
            })
            .unwrap();
            assert_eq!(verified(&path), Exit::Clean, "Type {kind}");
            run_of(&format!("sealblock corrupt {path} --lba 9 --kind ref-tag"));
            assert_eq!(verified(&path), Exit::DamageFound, "Type {kind}");
        }
    }
}
