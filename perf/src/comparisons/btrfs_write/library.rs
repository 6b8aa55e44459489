//! The engine in this process.

use std::cell::Cell;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use fastrand::Rng;
use sealblock_btrfs_engine::engine::{Engine, EngineOptions};
use sealblock_btrfs_engine::names::Place;
use sealblock_btrfs_engine::operations::Resolved;
use sealblock_btrfs_format::items::inode::InodeFlags;
use sealblock_runtime_memory::Slice;
use sealblock_runtime_reactor::spawn;
use sealblock_stack::filesystem::FilesystemName;
use sealblock_stack::{Cause, StackError, on_reactor};

use super::loads::{Data, Synced, Work};
use crate::engine_files::{DIRECTORY, ROOT, create, engine_options, fill, now, write};
use crate::load::payload;
use crate::meter::{Meter, Turn};

/// What a turn needs.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    /// The loop device.
    pub device: &'a str,
    /// Bytes of all files together.
    pub bytes: u64,
    /// How long it lasts.
    pub time: Duration,
    /// Files that are created.
    pub names: u64,
    /// The number of the round.
    pub seed: u64,
}

/// Opens the filesystem on a device, works with it, and closes it.
pub fn with_engine<T>(
    device: &str,
    options: EngineOptions,
    work: impl AsyncFnOnce(Rc<Engine>) -> anyhow::Result<T>,
) -> anyhow::Result<T> {
    let name = FilesystemName::parse(device.as_ref()).map_err(anyhow::Error::msg)?;
    let failed = |error: &dyn std::fmt::Display| StackError::new(Cause::Io, "measure", error);
    let done = on_reactor(async {
        let open = name.open_to_write().await?;
        open.close_after(async |open| {
            let engine = Engine::open(&open.filesystem, options).await.map_err(|error| failed(&error))?;
            let engine = Rc::new(engine);
            let done = work(Rc::clone(&engine)).await.map_err(|error| failed(&format!("{error:#}")))?;
            engine.finish_writes().await;
            engine.commit().await.map_err(|error| failed(&error))?;
            Ok(done)
        })
        .await
    });
    done.context("the engine")
}

/// One turn.
pub fn turn(setting: &Setting<'_>, work: &Work) -> anyhow::Result<Vec<Turn>> {
    with_engine(setting.device, engine_options(), async |engine| match work {
        Work::Data(data) => Ok(vec![data_turn(engine, setting, data).await?]),
        Work::Synced(synced) => Ok(vec![synced_turn(engine, setting, synced).await?]),
        Work::Names => names_turn(&engine, setting).await,
    })
}

async fn data_turn(engine: Rc<Engine>, setting: &Setting<'_>, data: &Data) -> anyhow::Result<Turn> {
    let (payload, file_bytes) = (payload(), setting.bytes / data.jobs as u64);
    let mut files = Vec::new();
    for job in 0..data.jobs {
        let ino = create(&engine, &format!("file-{job}"), InodeFlags::empty()).await?;
        fill(&engine, ino, file_bytes, &payload).await?;
        files.push(ino);
    }
    engine.commit().await?;
    let (meter, end) = (Meter::start(Some(setting.device), None)?, Instant::now() + setting.time);
    let requests = requests(&engine, &files, data, file_bytes, (end, setting.seed), &payload).await?;
    if data.is_write {
        engine.commit().await?;
    }
    meter.stop(requests, None)
}

/// Sends requests until the end. Returns their number.
pub async fn requests(
    engine: &Rc<Engine>,
    files: &[u64],
    data: &Data,
    file_bytes: u64,
    (end, seed): (Instant, u64),
    payload: &Slice,
) -> anyhow::Result<u64> {
    let (done, mut workers) = (Rc::new(Cell::new(0)), Vec::new());
    for (job, ino) in files.iter().copied().enumerate() {
        let cursor = Rc::new(Cell::new(0));
        for worker in 0..data.depth {
            let (engine, done, cursor, data) = (Rc::clone(engine), Rc::clone(&done), Rc::clone(&cursor), *data);
            let payload = payload.slice(..data.bytes as usize);
            let mut random = Rng::with_seed(seed * 1000 + (job * data.depth + worker) as u64);
            workers.push(spawn(async move {
                let places = file_bytes / data.bytes;
                while Instant::now() < end {
                    let place = if data.is_random { random.u64(..places) } else { cursor.get() % places };
                    cursor.set(cursor.get() + 1);
                    match data.is_write {
                        true => write(&engine, ino, place * data.bytes, payload.clone()).await?,
                        false => {
                            let read = engine.read(ROOT, ino, place * data.bytes, data.bytes).await?;
                            anyhow::ensure!(read.len() as u64 == data.bytes, "a read is short");
                        }
                    }
                    done.set(done.get() + 1);
                }
                anyhow::Ok(())
            }));
        }
    }
    for worker in workers {
        worker.await.context("a worker was aborted")??;
    }
    Ok(done.get())
}

async fn synced_turn(engine: Rc<Engine>, setting: &Setting<'_>, synced: &Synced) -> anyhow::Result<Turn> {
    let (payload, file_bytes) = (payload(), setting.bytes / synced.jobs as u64);
    let flags = if synced.is_nodatacow { InodeFlags::NODATACOW } else { InodeFlags::empty() };
    let mut files = Vec::new();
    for job in 0..synced.jobs {
        let ino = create(&engine, &format!("file-{job}"), flags).await?;
        match synced.is_written {
            true => fill(&engine, ino, file_bytes, &payload).await?,
            false => engine.allocate_range(ROOT, ino, (0, file_bytes), false).await?,
        }
        files.push(ino);
    }
    engine.commit().await?;
    let (meter, end) = (Meter::start(Some(setting.device), None)?, Instant::now() + setting.time);
    let (done, mut workers) = (Rc::new(Cell::new(0)), Vec::new());
    for (job, ino) in files.into_iter().enumerate() {
        let (engine, done, piece, is_data_only) =
            (Rc::clone(&engine), Rc::clone(&done), payload.slice(..4096), synced.is_data_only);
        let mut places: Vec<u64> = (0..file_bytes / 4096).collect();
        Rng::with_seed(setting.seed * 1000 + job as u64).shuffle(&mut places);
        workers.push(spawn(async move {
            for place in places {
                if Instant::now() >= end {
                    break;
                }
                write(&engine, ino, place * 4096, piece.clone()).await?;
                match is_data_only {
                    true => engine.sync_data(ROOT, ino).await?,
                    false => drop(engine.fsync(ROOT, ino).await?),
                }
                done.set(done.get() + 1);
            }
            anyhow::Ok(())
        }));
    }
    for worker in workers {
        worker.await.context("a worker was aborted")??;
    }
    meter.stop(done.get(), None)
}

/// Creates, looks up and deletes; each is durable at the end.
async fn names_turn(engine: &Engine, setting: &Setting<'_>) -> anyhow::Result<Vec<Turn>> {
    let names: Vec<String> = (0..setting.names).map(|index| format!("a-file-{index:08}")).collect();
    let mut turns = Vec::new();
    let meter = Meter::start(Some(setting.device), None)?;
    for name in &names {
        create(engine, name, InodeFlags::empty()).await?;
    }
    engine.commit().await?;
    turns.push(meter.stop(setting.names, None)?);
    let meter = Meter::start(Some(setting.device), None)?;
    for name in &names {
        let place = Place { directory: DIRECTORY, name: name.as_bytes() };
        let entry = engine.lookup(ROOT, place).await?.context("a name is there")?;
        let Resolved::Inode(ino) = entry.target else { anyhow::bail!("{name} is a subvolume") };
        engine.stat(ROOT, ino).await?;
    }
    turns.push(meter.stop(setting.names, None)?);
    let meter = Meter::start(Some(setting.device), None)?;
    for name in &names {
        let place = Place { directory: DIRECTORY, name: name.as_bytes() };
        let unlinked = engine.unlink(ROOT, place, now()).await?;
        engine.release(ROOT, unlinked.ino).await?;
    }
    engine.commit().await?;
    turns.push(meter.stop(setting.names, None)?);
    Ok(turns)
}
