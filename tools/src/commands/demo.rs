//! `sealblock demo`: the main job from start to end, on a volume of its own.
//!
//! Every step is done by the code that the other commands use, and checked: a demonstration that does not find exactly the
//! damage it made ends with exit status 1.

use std::fs;
use std::path::Path;

use sealblock_block::{BadBlock, Device, Durability, Expectations, Request, Response};
use sealblock_integrity::{Sealed, Tags};
use sealblock_media_volume::CorruptionKind;
use sealblock_runtime_memory::Buffer;
use sealblock_stack::target::TargetName;
use sealblock_stack::{Access, Cause, OpenTarget, StackError, device_error, on_reactor, open, open_volume};
use sealblock_units::{ByteCount, Extent, Lba};

use super::{corrupt, create};
use crate::cli::Demo;
use crate::exit::Exit;
use crate::report::say;

/// Name of the volume in its folder.
const NAME: &str = "demo.volume";
/// Size of the volume.
const SIZE: ByteCount = ByteCount::new(64 << 20);
/// Bytes of this program that are written at most.
const DATA_BYTES: usize = 32 << 20;
/// The damaged blocks and the kind of damage. All are among the first blocks of any program.
const DAMAGE: [(u64, CorruptionKind, &str); 6] = [
    (3, CorruptionKind::Data, "data changed"),
    (7, CorruptionKind::Guard, "guard changed"),
    (21, CorruptionKind::RefTag, "reference tag changed"),
    (34, CorruptionKind::AppTag, "application tag changed"),
    (55, CorruptionKind::LostWrite, "last write lost"),
    (89, CorruptionKind::Misdirected, "another block's write landed here"),
];

/// Shows the main job.
pub fn run(arguments: &Demo) -> Result<Exit, StackError> {
    let path = arguments.dir.join(NAME);
    fs::create_dir_all(&arguments.dir).map_err(|error| StackError::at_path("create", &error, &arguments.dir))?;
    // Only a demonstration makes a file of this name, so an earlier one's may go.
    match fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(StackError::io("remove", &error).on(path.display()));
        }
        _ => {}
    }
    let data = own_program()?;
    step(1, &format!("create {}: {SIZE}, guard crc32c, Type 1", path.display()))?;
    create::make(&path, &create::default_options(SIZE)?, false)?;
    on_reactor(shown(&path, &data))
}

async fn shown(path: &Path, data: &Buffer) -> Result<Exit, StackError> {
    let target = TargetName::File(path.to_owned());
    step(2, &format!("write this program into it: {}, then flush", ByteCount::new(data.len() as u64)))?;
    open(&target, Access::Write).await?.close_after(async |opened| write(opened, 0, data).await).await?;

    step(3, "verify every block")?;
    if !faults(&target).await?.is_empty() {
        return wrong("an undamaged volume was reported as damaged");
    }
    say("   clean")?;

    step(4, "damage six blocks without the volume's knowledge, each in another way")?;
    damage(path).await?;

    step(5, "verify again")?;
    let found = faults(&target).await?;
    found.iter().try_for_each(|fault| say(&format!("   {fault}")))?;
    if !found.iter().map(|fault| fault.lba.get()).eq(DAMAGE.iter().map(|damage| damage.0)) {
        return wrong("the reported blocks are not the damaged ones");
    }
    say("   exactly the damaged blocks")?;
    repair(&target, data).await
}

async fn damage(path: &Path) -> Result<(), StackError> {
    let volume = open_volume(path, Access::Write).await?.volume;
    for (lba, kind, words) in DAMAGE {
        corrupt::damage(&volume, Lba::new(lba), kind).await?;
        say(&format!("   block {lba}: {words}"))?;
    }
    volume.close().await.map_err(|error| device_error("close", &error))
}

/// Reads the blocks: the damaged ones fail, the others are as written. Then writes the damaged ones anew.
async fn repair(target: &TargetName, data: &Buffer) -> Result<Exit, StackError> {
    step(6, "read all blocks: damaged blocks fail, the others have the written data")?;
    let opened = open(target, Access::Write).await?;
    let size = opened.device.geometry().block_size.bytes();
    for (index, block) in data.chunks(size).enumerate() {
        let damaged = DAMAGE.iter().any(|damage| damage.0 == index as u64);
        match (opened.read(Extent::one(Lba::new(index as u64))).await, damaged) {
            (Ok(Response::Data(read)), false) if read.joined_data()[..] == *block => {}
            (Err(error), true) if error.bad_blocks().is_some() => {}
            _ => return opened.close(wrong(&format!("block {index} was read wrongly"))).await,
        }
    }
    say(&format!("   {} blocks correct, {} failed", data.len() / size - DAMAGE.len(), DAMAGE.len()))?;

    step(7, "rewrite the damaged blocks, and verify")?;
    for (lba, ..) in DAMAGE {
        let at = lba as usize * size;
        write(&opened, lba, &Buffer::copy_from(&data[at..at + size])).await?;
    }
    opened.close(Ok(())).await?;
    if !faults(target).await?.is_empty() {
        return wrong("some blocks are still damaged");
    }
    say("   clean")?;
    say(&format!(
        "\nThe volume is kept for further experiments:\n   sealblock info {target}\n   sealblock verify {target}"
    ))?;
    Ok(Exit::Clean)
}

/// This program's own bytes, in whole blocks: real data that every machine has.
fn own_program() -> Result<Buffer, StackError> {
    let bytes =
        std::env::current_exe().and_then(fs::read).map_err(|error| StackError::io("read this program", &error))?;
    let bytes = &bytes[..bytes.len().min(DATA_BYTES)];
    let mut data = Buffer::zeroed(bytes.len().next_multiple_of(4096));
    data[..bytes.len()].copy_from_slice(bytes);
    Ok(data)
}

async fn write(opened: &OpenTarget, first: u64, data: &Buffer) -> Result<(), StackError> {
    let geometry = opened.device.geometry();
    let extent = Extent::from_raw(first, (data.len() >> geometry.block_size.shift()) as u64)
        .map_err(|error| StackError::new(Cause::Usage, "write", error))?;
    let tags = Tags { app_tag: 0, storage_tag: 0, initial_ref_tag: first };
    let data = Sealed::seal(Buffer::copy_from(data).freeze(), geometry.block_size, geometry.protection, &tags);
    let write = Request::write(extent, data, Durability::Volatile);
    opened.device.execute(write).await.map_err(|error| device_error("write", &error))?;
    opened.flush().await
}

/// Every damaged block of a target.
async fn faults(target: &TargetName) -> Result<Vec<BadBlock>, StackError> {
    let find = async |opened: &OpenTarget| {
        let geometry = opened.device.geometry();
        let mut found = Vec::new();
        for extent in geometry.whole(geometry.limits.max_verify_blocks) {
            if let Err(error) = opened.device.execute(Request::verify(extent, Expectations::NONE)).await {
                let bad_blocks = error.bad_blocks().ok_or_else(|| device_error("verify", &error))?;
                found.extend_from_slice(bad_blocks.as_slice());
            }
        }
        Ok(found)
    };
    open(target, Access::Read).await?.close_after(find).await
}

fn step(number: u32, words: &str) -> Result<(), StackError> {
    say(&format!("{number}. {words}"))
}

fn wrong(why: &str) -> Result<Exit, StackError> {
    say(&format!("   WRONG: {why}"))?;
    Ok(Exit::DamageFound)
}
