package relay

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"aether/mtls/record"
)

// slotLen is the room for one record in a buffer: a whole one as it comes, and
// one to seal with what any suite adds.
const slotLen = record.MaxRecord

// sizes are the buffers a direction grows through while its reads fill them: 16
// KiB while little moves, then 64, then 256. Beyond limit buffers of a size
// in use at once, on the whole node, a direction makes do with the next smaller
// one, so that slow readers cannot hold much memory: 32 MiB of each at most.
var sizes = [...]*size{
	{slots: 1, limit: 1 << 62},
	{slots: 4, limit: 512},
	{slots: 16, limit: 128},
}

type size struct {
	slots int
	limit int64
	inUse atomic.Int64
	pool  sync.Pool
}

// buffer has one owner, who calls put exactly once.
type buffer struct {
	b    []byte
	size *size
}

// take returns a buffer of the level's size, or of a smaller one.
func take(level int) *buffer {
	s := sizes[level]
	for s.inUse.Add(1) > s.limit {
		s.inUse.Add(-1)
		level--
		s = sizes[level]
	}
	if b, ok := s.pool.Get().(*buffer); ok {
		b.size = s
		return b
	}
	return &buffer{b: make([]byte, s.slots*slotLen), size: s}
}

func (b *buffer) put() {
	s := b.size
	if s == nil {
		panic("relay: buffer put twice")
	}
	b.size = nil
	s.inUse.Add(-1)
	s.pool.Put(b)
}

// filler reads once from fd into b. It answers as read(2) does.
type filler interface {
	fill(fd int, b []byte) (int, error)
	room(b []byte) int // what fill can give at most
}

// plainFill reads into the buffer from its beginning.
type plainFill struct{}

func (plainFill) fill(fd int, b []byte) (int, error) { return unix.Read(fd, b) }
func (plainFill) room(b []byte) int                  { return len(b) }

// intake reads from one connection. It takes a buffer only when there is
// something to read.
type intake struct {
	src   *end
	how   filler
	level int
	ready func(fd uintptr) bool // made once

	buf *buffer // held from read to release
	n   int
	err error
}

func newIntake(src *end, how filler) *intake {
	in := &intake{src: src, how: how}
	in.ready = func(fd uintptr) bool {
		if in.buf == nil {
			in.buf = take(in.level)
		}
		for {
			in.n, in.err = in.how.fill(int(fd), in.buf.b)
			if in.err != syscall.EINTR {
				break
			}
		}
		if in.err == syscall.EAGAIN {
			in.release()
			return false
		}
		return true
	}
	return in
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

// release gives the buffer back; without one it does nothing.
func (in *intake) release() {
	if in.buf != nil {
		in.buf.put()
		in.buf = nil
	}
}

// spliceWorth is how many bytes a splice must move to be cheaper than a copy.
const spliceWorth = 4096

// pipeLen is asked for as a pipe's size. A slot of it holds one fragment of a
// packet, so it must be large to take many.
const pipeLen = 1 << 20

var errNoPipe = errors.New("relay: no pipe")

// pipes keeps empty pipes for the next splice: 64 idle ones at most.
var pipes = make(chan *pipe, 64)

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

	pipe *pipe
	n    int64 // in the pipe
	err  error
}

func newSplicer(src, dst *end) *splicer {
	const flags = unix.SPLICE_F_MOVE | unix.SPLICE_F_NONBLOCK
	s := &splicer{src: src, dst: dst}
	s.fill = func(fd uintptr) bool {
		if s.pipe == nil {
			if s.pipe, s.err = takePipe(); s.err != nil {
				return true
			}
		}
		for {
			s.n, s.err = unix.Splice(int(fd), nil, s.pipe.w, nil, pipeLen, flags)
			if s.err != syscall.EINTR {
				break
			}
		}
		if s.err == syscall.EAGAIN { // the pipe is empty, so it is the socket that has nothing
			s.pipe.put()
			s.pipe = nil
			return false
		}
		return true
	}
	s.emit = func(fd uintptr) bool {
		for s.n > 0 {
			m, err := unix.Splice(s.pipe.r, nil, int(fd), nil, int(s.n), flags)
			switch err {
			case nil:
				s.n -= m
			case syscall.EINTR:
			case syscall.EAGAIN:
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
// returns how many came; 0 and no error: src's end. errNoPipe: nothing was moved.
func (s *splicer) move(total *int64) (int, error) {
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
		if s.err != nil {
			return 0, &sideError{s.src.side, fmt.Errorf("relay: read: %w", s.err)}
		}
		return 0, nil
	}
	came := s.n
	s.pipe = p
	err := s.dst.raw.Write(s.emit)
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
