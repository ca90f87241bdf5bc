package main

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// Bounds of one wait for the other side.
const (
	dialTimeout = 5 * time.Second
	ioTimeout   = 60 * time.Second
)

// idle opens n connections, one request on each, says so on out ({"idle":n}) and
// keeps them until in ends.
func idle(to netip.AddrPort, request []byte, n int, in io.Reader, out io.Writer) error {
	conns := make([]net.Conn, 0, n)
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	buf := make([]byte, 4096)
	for i := range n {
		c, err := net.DialTimeout("tcp", to.String(), dialTimeout)
		if err != nil {
			return fmt.Errorf("idle: connection %d: %w", i+1, err)
		}
		conns = append(conns, c)
		c.SetDeadline(time.Now().Add(ioTimeout))
		if _, err := c.Write(request); err != nil {
			return fmt.Errorf("idle: request %d: %w", i+1, err)
		}
		for have := 0; ; {
			k, err := c.Read(buf[have:])
			if err != nil {
				return fmt.Errorf("idle: answer %d: %w", i+1, err)
			}
			have += k
			size, err := answer(buf[:have])
			if err != nil {
				return fmt.Errorf("idle: answer %d: %w", i+1, err)
			}
			if size > 0 {
				break
			}
		}
	}
	if err := json.NewEncoder(out).Encode(map[string]int{"idle": n}); err != nil {
		return err
	}
	if _, err := io.Copy(io.Discard, in); err != nil {
		return fmt.Errorf("idle: %w", err)
	}
	for i, c := range conns {
		if err := quiet(c); err != nil {
			return fmt.Errorf("idle: connection %d did not stay: %w", i+1, err)
		}
	}
	return nil
}

// quiet returns nil when the connection is open and nothing has come on it.
func quiet(c net.Conn) error {
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return err
	}
	var n int
	var peek error
	err = raw.Control(func(fd uintptr) {
		n, _, peek = unix.Recvfrom(int(fd), make([]byte, 1), unix.MSG_PEEK|unix.MSG_DONTWAIT)
	})
	switch {
	case err != nil:
		return err
	case errors.Is(peek, unix.EAGAIN):
		return nil
	case peek != nil:
		return peek
	case n == 0:
		return io.ErrUnexpectedEOF
	}
	return errors.New("bytes came that nobody asked for")
}

// Transfer is what transfer measured.
type Transfer struct {
	Bytes   int64   `json:"bytes"`
	Seconds float64 `json:"seconds"`
}

// upward is the bit of what a source is asked that says that the bytes go to it.
const upward = 1 << 63

// transfer moves n bytes over so many connections at once, from source or to it. Eight bytes, client first, say how many a
// connection (big-endian, with upward); the receiver of an upload answers its end with one byte.
func transfer(to netip.AddrPort, n int64, streams int, up bool) (*Transfer, error) {
	start := time.Now()
	errs := make(chan error, streams)
	for i := range int64(streams) {
		share := n / int64(streams)
		if i == 0 {
			share += n % int64(streams)
		}
		go func() { errs <- one(to, share, up) }()
	}
	var err error
	for range streams {
		err = errors.Join(err, <-errs)
	}
	if err != nil {
		return nil, err
	}
	return &Transfer{Bytes: n, Seconds: time.Since(start).Seconds()}, nil
}

// one is one connection of a transfer.
func one(to netip.AddrPort, n int64, up bool) error {
	c, err := net.DialTimeout("tcp", to.String(), dialTimeout)
	if err != nil {
		return err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(ioTimeout))
	ask := uint64(n)
	if up {
		ask |= upward
	}
	if _, err := c.Write(binary.BigEndian.AppendUint64(nil, ask)); err != nil {
		return err
	}
	buf := make([]byte, 256<<10)
	if !up {
		return receive(c, n, buf)
	}
	if err := give(c, n, buf); err != nil {
		return err
	}
	_, err = io.ReadFull(c, buf[:1])
	return err
}

// receive reads n bytes.
func receive(c net.Conn, n int64, buf []byte) error {
	for got := int64(0); got < n; {
		k, err := c.Read(buf)
		got += int64(k)
		if err != nil && got < n {
			return fmt.Errorf("after %d of %d bytes: %w", got, n, err)
		}
	}
	return nil
}

// give writes n bytes.
func give(c net.Conn, n int64, buf []byte) error {
	for left := n; left > 0; {
		k, err := c.Write(buf[:min(left, int64(len(buf)))])
		left -= int64(k)
		if err != nil {
			return fmt.Errorf("after %d of %d bytes: %w", n-left, n, err)
		}
	}
	return nil
}

// source serves one connection of a transfer and waits for the client to close.
func source(c net.Conn) error {
	var ask [8]byte
	if _, err := io.ReadFull(c, ask[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint64(ask[:])
	buf := make([]byte, 256<<10)
	var err error
	if n&upward != 0 {
		if err = receive(c, int64(n&^upward), buf); err == nil {
			_, err = c.Write(buf[:1])
		}
	} else {
		err = give(c, int64(n), buf)
	}
	if err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, c)
	return err
}

// First is what firstByte measured.
type First struct {
	Milliseconds float64 `json:"first_byte_ms"`
}

// firstByte connects, says nothing, and times the server's first byte.
func firstByte(to netip.AddrPort) (*First, error) {
	start := time.Now()
	c, err := net.DialTimeout("tcp", to.String(), dialTimeout)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	c.SetDeadline(time.Now().Add(ioTimeout))
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		return nil, err
	}
	return &First{Milliseconds: time.Since(start).Seconds() * 1e3}, nil
}

// banner speaks first, as a mail server does, and waits for the client to close.
func banner(c net.Conn) error {
	if _, err := io.WriteString(c, "220 ready\r\n"); err != nil {
		return err
	}
	_, err := io.Copy(io.Discard, c)
	return err
}

// serve accepts until the process is ended. A connection's failure is its client's to report.
func serve(on netip.AddrPort, handle func(net.Conn) error) error {
	l, err := net.Listen("tcp", on.String())
	if err != nil {
		return err
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		go func() {
			defer c.Close()
			handle(c)
		}()
	}
}
