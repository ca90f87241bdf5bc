package relay

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"aether/mtls/record"
	"aether/tproxy/socket"
)

// slotLen is the room for one record in a buffer: a whole one as it comes, and
// one to seal with what any suite adds.
const slotLen = record.MaxRecord

// How many buffers of a size are in use at once, on the whole node.
const (
	most64k  = 512
	most256k = 128
	most512k = 64
)

// sizes are the buffers a direction grows through while its reads fill them: 16
// KiB while little moves, then 64, 256 and 512. Beyond limit buffers of a size
// in use at once a direction makes do with the next smaller one, so that slow
// readers cannot hold much memory: 32 MiB of each at most. So does one whose account has no room for large
// buffers, with 16 KiB at once.
var sizes = [...]*size{
	{slots: 1, limit: 1 << 62},
	{slots: 4, limit: most64k},
	{slots: 16, limit: most256k},
	{slots: 32, limit: most512k},
}

type size struct {
	slots int
	limit int64
	inUse atomic.Int64
	pool  sync.Pool
}

// maxVec is how many pieces go into one readv or writev.
const maxVec = 64 // 32 at least: the places of the largest buffer

// buffer has one owner, who calls put exactly once.
type buffer struct {
	b      []byte
	size   *size
	permit *permit // of the direction that works with it; nil: it needs none
	mem    Memory

	vec  [maxVec]unix.Iovec    // of the next readv, or of the writev under way
	left []unix.Iovec          // of vec: what send has not written yet
	sent int64                 // what it has
	err  error                 // what stopped it
	emit func(fd uintptr) bool // writes left; made once
}

func newBuffer(s *size) *buffer {
	b := &buffer{b: make([]byte, s.slots*slotLen), size: s}
	b.emit = func(fd uintptr) bool {
		b.permit.acquire()
		for len(b.left) > 0 {
			n, err := writev(fd, b.left)
			switch err {
			case nil:
				b.advance(n)
			case syscall.EINTR:
			case syscall.EAGAIN:
				b.permit.release()
				return false
			default:
				b.err = err
				return true
			}
		}
		return true
	}
	return b
}

// piece makes p the piece i of the next send. It must stay as it is until then.
func (b *buffer) piece(i int, p []byte) {
	b.vec[i].Base = unsafe.SliceData(p)
	b.vec[i].SetLen(len(p))
}

// advance takes the first n bytes off what is left.
func (b *buffer) advance(n int) {
	b.sent += int64(n)
	for n > 0 {
		v := &b.left[0]
		if uint64(n) < v.Len {
			v.Base = (*byte)(unsafe.Add(unsafe.Pointer(v.Base), n))
			v.Len -= uint64(n)
			return
		}
		n -= int(v.Len)
		b.left = b.left[1:]
	}
}

// send writes the first n pieces to e, waiting where e takes no more, and adds to
// total what was written.
func (b *buffer) send(e *end, n int, total *int64) error {
	b.left, b.sent, b.err = b.vec[:n], 0, nil
	err := e.raw.Write(b.emit)
	e.wrote.Add(1)
	clear(b.vec[:n]) // what they point to is not kept alive from here
	b.left = nil
	*total += b.sent
	if err == nil {
		err = b.err
	}
	if err != nil {
		return &sideError{e.side, fmt.Errorf("relay: write: %w", err)}
	}
	return nil
}

// take returns a buffer of the level's size, or of a smaller one, for work in that permit, and accounts it to m, which may be nil.
func take(level int, t *permit, m Memory) *buffer {
	if level > 0 && m != nil && !m.Roomy() {
		level = 0
	}
	s := sizes[level]
	for s.inUse.Add(1) > s.limit {
		s.inUse.Add(-1)
		level--
		s = sizes[level]
	}
	b, ok := s.pool.Get().(*buffer)
	if !ok {
		b = newBuffer(s)
	}
	b.size, b.permit, b.mem = s, t, m
	if m != nil {
		m.HoldBytes(len(b.b))
	}
	return b
}

func (b *buffer) put() {
	s := b.size
	if s == nil {
		panic("relay: buffer put twice")
	}
	if b.mem != nil {
		b.mem.HoldBytes(-len(b.b))
	}
	b.size, b.permit, b.mem = nil, nil, nil
	s.inUse.Add(-1)
	s.pool.Put(b)
}

// filler reads once from fd into b. It answers as read(2) does.
type filler interface {
	fill(fd uintptr, b *buffer) (int, error)
	room(b []byte) int // what fill can give at most
}

// plainFill reads into the buffer from its beginning.
type plainFill struct{}

func (plainFill) fill(fd uintptr, b *buffer) (int, error) { return read(fd, b.b) }
func (plainFill) room(b []byte) int                       { return len(b) }

// intake reads from one connection. It takes a buffer, and a permit, only when there
// is something to read.
type intake struct {
	src   *end
	how   filler
	mem   Memory
	level int
	ready func(fd uintptr) bool // made once

	permit permit  // held from read to release, but for waits
	buf    *buffer // held from read to release
	n      int
	err    error

	at     time.Duration // of the last read, since origin
	wrote  uint32        // src.wrote then
	prompt int           // so many further reads are acknowledged at once
}

func newIntake(src *end, how filler, m Memory) *intake {
	in := &intake{src: src, how: how, mem: m}
	in.ready = func(fd uintptr) bool {
		in.permit.acquire()
		if in.buf == nil {
			in.buf = take(in.level, &in.permit, in.mem)
		}
		for {
			in.n, in.err = in.how.fill(fd, in.buf)
			if in.err != syscall.EINTR {
				break
			}
		}
		if in.err == syscall.EAGAIN {
			in.release()
			return false
		}
		if in.n > 0 && in.n < slotLen && in.src.tcp {
			in.came(fd)
		}
		return true
	}
	return in
}

// A peer that writes a message in two pieces, with Nagle's algorithm, keeps the second until the first is
// acknowledged, which the kernel puts off by 40 to 200 ms where nothing is sent that could carry it.
const (
	leastStall  = 35 * time.Millisecond  // between two reads of such a peer
	mostStall   = 250 * time.Millisecond // likewise
	promptReads = 1024                   // that are acknowledged at once, after a stall
)

var origin = time.Now()

// came is called with each small read. Two of them as far apart as a delayed acknowledgement, with
// nothing sent to the peer between, are taken for such a stall. A peer that stalls again is noticed again.
func (in *intake) came(fd uintptr) {
	now, wrote := time.Since(origin), in.src.wrote.Load()
	if gap := now - in.at; wrote == in.wrote && gap >= leastStall && gap <= mostStall {
		in.prompt = promptReads
	}
	in.at, in.wrote = now, wrote
	if in.prompt > 0 {
		in.prompt--
		socket.QuickAck(int(fd))
	}
}

// read waits for bytes and returns them; none and no error: the connection's
// end. They lie in in.buf, valid until release.
func (in *intake) read() ([]byte, error) {
	if err := in.src.raw.Read(in.ready); err != nil {
		return nil, &sideError{in.src.side, fmt.Errorf("relay: read: %w", err)}
	}
	if in.err != nil {
		return nil, &sideError{in.src.side, fmt.Errorf("relay: read: %w", in.err)}
	}
	return in.buf.b[:in.n], nil
}

// send writes p, of the buffer that read filled, to dst.
func (in *intake) send(dst *end, p []byte, total *int64) error {
	if len(p) == 0 {
		return nil
	}
	in.buf.piece(0, p)
	return in.buf.send(dst, 1, total)
}

// adapt lets the next buffer be larger when this one was filled, and smaller when
// it was mostly empty.
func (in *intake) adapt() {
	switch room := in.how.room(in.buf.b); {
	case in.n == room && in.level < len(sizes)-1:
		in.level++
	case in.n < room/4 && in.level > 0:
		in.level--
	}
}

// release gives buffer and permit back, those that there are.
func (in *intake) release() {
	if in.buf != nil {
		in.buf.put()
		in.buf = nil
	}
	in.permit.release()
}

// spliceWorth is how many bytes a splice must move to be cheaper than a copy.
const spliceWorth = 4096

// pipeLen is asked for as a pipe's size. A slot of it holds one fragment of a
// packet, so it must be large to take many.
const pipeLen = 1 << 20

var (
	errNoPipe = errors.New("relay: no pipe")
	errUrgent = errors.New("relay: a splice does not go past urgent data")
)

const keepPipes = 64

// pipes keeps empty pipes for the next splice.
var pipes = make(chan *pipe, keepPipes)

type pipe struct{ r, w int }

func takePipe() (*pipe, error) {
	select {
	case p := <-pipes:
		return p, nil
	default:
	}
	var fd [2]int
	if err := unix.Pipe2(fd[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return nil, fmt.Errorf("%w: %w", errNoPipe, err)
	}
	unix.FcntlInt(uintptr(fd[1]), unix.F_SETPIPE_SZ, pipeLen) // refused beyond a user's share: then it stays small
	return &pipe{fd[0], fd[1]}, nil
}

// put gives back a pipe, which must be empty.
func (p *pipe) put() {
	select {
	case pipes <- p:
	default:
		p.close()
	}
}

func (p *pipe) close() {
	unix.Close(p.r)
	unix.Close(p.w)
}

// splicer moves bytes from one socket to another inside the kernel.
type splicer struct {
	src, dst   *end
	fill, emit func(fd uintptr) bool // made once

	permit permit
	pipe   *pipe
	n      int64 // in the pipe
	err    error
}

func newSplicer(src, dst *end) *splicer {
	s := &splicer{src: src, dst: dst}
	s.fill = func(fd uintptr) bool {
		s.permit.acquire()
		if s.pipe == nil {
			if s.pipe, s.err = takePipe(); s.err != nil {
				return true
			}
		}
		for {
			s.n, s.err = splice(fd, uintptr(s.pipe.w), pipeLen)
			if s.err != syscall.EINTR {
				break
			}
		}
		if (s.err == syscall.EAGAIN || s.err == nil && s.n == 0) && atMark(fd) { // behind a FIN it answers 0 there
			s.n, s.err = 0, errUrgent
			return true
		}
		if s.err == syscall.EAGAIN { // the pipe is empty, so it is the socket that has nothing
			s.pipe.put()
			s.pipe = nil
			s.permit.release()
			return false
		}
		return true
	}
	s.emit = func(fd uintptr) bool {
		s.permit.acquire()
		for s.n > 0 {
			m, err := splice(uintptr(s.pipe.r), fd, int(s.n))
			switch err {
			case nil:
				s.n -= m
			case syscall.EINTR:
			case syscall.EAGAIN:
				s.permit.release()
				return false
			default:
				s.err = err
				return true
			}
		}
		return true
	}
	return s
}

// move waits for bytes of src and moves what is there to dst, adding to total. It
// returns how many came; 0 and no error: src's end. errNoPipe, errUrgent: nothing was moved.
func (s *splicer) move(total *int64) (int, error) {
	defer s.permit.release()
	if err := s.src.raw.Read(s.fill); err != nil {
		return 0, &sideError{s.src.side, fmt.Errorf("relay: read: %w", err)}
	}
	if s.err != nil && s.pipe == nil {
		return 0, s.err
	}
	p := s.pipe
	s.pipe = nil
	if s.err != nil || s.n <= 0 {
		p.put()
		if s.err == errUrgent {
			return 0, s.err
		}
		if s.err != nil {
			return 0, &sideError{s.src.side, fmt.Errorf("relay: read: %w", s.err)}
		}
		return 0, nil
	}
	came := s.n
	s.pipe = p
	err := s.dst.raw.Write(s.emit)
	s.dst.wrote.Add(1)
	s.pipe = nil
	*total += came - s.n
	if err == nil {
		err = s.err
	}
	if err != nil {
		p.close() // with what is left in it
		return int(came), &sideError{s.dst.side, fmt.Errorf("relay: write: %w", err)}
	}
	p.put()
	return int(came), nil
}
