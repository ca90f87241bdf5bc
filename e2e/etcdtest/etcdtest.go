// Package etcdtest runs real etcd servers for tests, on loopback addresses of
// their own.
//
//   - The binary is built from the module in testdata/etcd, which pins it and what it
//     needs, so that none of it is in the proxy's own go.mod; it is kept in the user's
//     cache directory.
//   - A server keeps its address and its data from one start to the next, whatever ended it.
//   - Every process that is started here has ended when the test has.
//
// It knows nothing of what is kept in etcd.
package etcdtest

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"aether/e2e/rig"
)

// patience is how long a server may take to serve: a member waits for the others,
// and the machine may be busy.
const patience = time.Minute

// Options of servers. The zero value is a server without TLS.
type Options struct {
	// TLS: clients come by mutual TLS, with the files that Server.Files names.
	TLS bool
	// Args are more of etcd's own flags.
	Args []string
}

// Start starts one server.
func Start(t testing.TB) *Server {
	t.Helper()
	return StartWith(t, Options{})
}

// StartWith starts one server with options.
func StartWith(t testing.TB, o Options) *Server {
	t.Helper()
	return ClusterWith(t, 1, o)[0]
}

// Cluster starts n servers that are members of one cluster.
func Cluster(t testing.TB, n int) []*Server {
	t.Helper()
	return ClusterWith(t, n, Options{})
}

// ClusterWith starts n servers that are members of one cluster.
func ClusterWith(t testing.TB, n int, o Options) []*Server {
	t.Helper()
	bin, err := Tool.Build(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	all := make([]*Server, n)
	var initial []string
	for i := range all {
		s := &Server{t: t, bin: bin, args: o.Args, name: fmt.Sprintf("member%d", i+1), dir: t.TempDir()}
		ip := newIP()
		s.client, s.peer = freePort(t, ip), freePort(t, ip)
		if o.TLS {
			if i == 0 {
				s.files = newFiles(t)
			} else {
				s.files = all[0].files
			}
			s.files.issue(t, s.certDir(), ip)
		}
		initial = append(initial, s.name+"=http://"+s.peer)
		all[i] = s
	}
	for _, s := range all {
		s.initial = strings.Join(initial, ",")
		t.Cleanup(s.Kill)
		s.start()
	}
	for _, s := range all {
		s.Await()
	}
	return all
}

// Server is one etcd. Its methods fail the test where they cannot do what they
// say. Not safe for concurrent use, but for Endpoint, TLS and Client.
type Server struct {
	t            testing.TB
	bin          string
	args         []string
	name         string
	dir          string
	client, peer string // address:port
	initial      string
	files        *Files // nil: no TLS

	cmd   *exec.Cmd     // nil: not running
	ended chan struct{} // closed when it has
}

// Endpoint is the URL of the server for clients.
func (s *Server) Endpoint() string {
	if s.files != nil {
		return "https://" + s.client
	}
	return "http://" + s.client
}

// Addr is the server's address and port for clients.
func (s *Server) Addr() string { return s.client }

// Files are those of a client's TLS; nil for a server without.
func (s *Server) Files() *Files { return s.files }

// TLS is a client's configuration; nil for a server without.
func (s *Server) TLS() *tls.Config {
	if s.files == nil {
		return nil
	}
	c, err := s.files.Config()
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// Client makes a client of this server alone, which is closed with the test.
func (s *Server) Client() *clientv3.Client {
	s.t.Helper()
	c, err := s.newClient(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { c.Close() })
	return c
}

func (s *Server) newClient(ctx context.Context) (*clientv3.Client, error) {
	return clientv3.New(clientv3.Config{Endpoints: []string{s.Endpoint()}, TLS: s.TLS(), Context: ctx, Logger: zap.NewNop()})
}

// Leader is the one of a cluster's running servers that leads it, once one does.
func Leader(t testing.TB, cluster []*Server) *Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	var leader *Server
	if err := rig.Until(ctx, func(ctx context.Context) error {
		for _, s := range cluster {
			if s.cmd == nil {
				continue
			}
			if leads, err := s.leads(ctx); err != nil {
				return err
			} else if leads {
				leader = s
				return nil
			}
		}
		return errors.New("no running member leads")
	}); err != nil {
		t.Fatal(err)
	}
	return leader
}

func (s *Server) leads(ctx context.Context) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	c, err := s.newClient(ctx)
	if err != nil {
		return false, err
	}
	defer c.Close()
	r, err := c.Status(ctx, s.Endpoint())
	if err != nil {
		return false, err
	}
	return r.Leader != 0 && r.Leader == r.Header.MemberId, nil
}

func (s *Server) dataDir() string { return filepath.Join(s.dir, "data") }
func (s *Server) certDir() string { return filepath.Join(s.dir, "certs") }
func (s *Server) logFile() string { return filepath.Join(s.dir, "log") }

// start starts the process, and does not wait until it serves.
func (s *Server) start() {
	s.t.Helper()
	log, err := os.OpenFile(s.logFile(), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		s.t.Fatal(err)
	}
	defer log.Close()
	args := []string{
		"--name", s.name, "--data-dir", s.dataDir(), "--initial-cluster", s.initial, "--initial-cluster-token", "etcdtest",
		"--listen-client-urls", s.Endpoint(), "--advertise-client-urls", s.Endpoint(),
		"--listen-peer-urls", "http://" + s.peer, "--initial-advertise-peer-urls", "http://" + s.peer,
		// What is written survives the process, which is all that dies here; a second or so
		// is a long pause on a busy machine, and no reason for an election.
		"--unsafe-no-fsync", "--heartbeat-interval", "100", "--election-timeout", "1500", "--log-level", "warn",
	}
	if s.files != nil {
		args = append(args, "--client-cert-auth", "--trusted-ca-file", s.files.CA,
			"--cert-file", filepath.Join(s.certDir(), "cert.pem"), "--key-file", filepath.Join(s.certDir(), "key.pem"))
	}
	cmd := exec.Command(s.bin, append(args, s.args...)...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // a test that panics cleans nothing up
	ended, started := make(chan struct{}), make(chan error)
	go func() {
		runtime.LockOSThread() // the signal comes when this thread ends, and so it stays
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait() // killed, most often
		}
		close(ended)
	}()
	if err := <-started; err != nil {
		s.t.Fatalf("start etcd: %v", err)
	}
	s.cmd, s.ended = cmd, ended
}

// Await waits until the server answers a read that its whole cluster has agreed on.
func (s *Server) Await() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), patience)
	defer cancel()
	go func(ended <-chan struct{}) {
		select {
		case <-ended: // nobody waits for the dead
			cancel()
		case <-ctx.Done():
		}
	}(s.ended)
	c, err := s.newClient(ctx)
	if err != nil {
		s.t.Fatal(err)
	}
	defer c.Close()
	if err := rig.Until(ctx, func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		_, err := c.Get(ctx, "etcdtest")
		if err != nil && strings.Contains(err.Error(), "user name is empty") { // authentication is on: it serves
			return nil
		}
		return err
	}); err != nil {
		s.t.Fatalf("etcd %s does not serve: %v; its log ends:\n%s", s.name, err, s.tail())
	}
}

func (s *Server) tail() []byte {
	b, err := os.ReadFile(s.logFile())
	if err != nil {
		return []byte(err.Error())
	}
	return b[max(0, len(b)-4000):]
}

// Kill ends the server at once (SIGKILL), and returns when it has ended. One that
// does not run is left so.
func (s *Server) Kill() {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill() // it may have ended by itself
	<-s.ended
	s.cmd = nil
}

// Restart starts a server that has been killed, on its address and with its data,
// and waits until it serves.
func (s *Server) Restart() {
	s.t.Helper()
	s.Begin()
	s.Await()
}

// Begin is Restart, but does not wait, as Await does: a member of a cluster without a majority does not serve.
func (s *Server) Begin() {
	s.t.Helper()
	if s.cmd != nil {
		s.t.Fatalf("etcd %s runs", s.name)
	}
	s.start()
}

// Pause stops the server in its tracks (SIGSTOP): its connections stay, and nothing
// moves on them. Kill works on a paused server too.
func (s *Server) Pause() { s.signal(syscall.SIGSTOP) }

// Resume lets it run again.
func (s *Server) Resume() { s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig syscall.Signal) {
	s.t.Helper()
	if s.cmd == nil {
		s.t.Fatalf("etcd %s does not run", s.name)
	}
	if err := s.cmd.Process.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
}

// Wipe takes all data from a server that has been killed: after Restart it is new and
// empty, at the same address. Its cluster has the ID that it had, for etcd makes it
// from addresses and a token.
func (s *Server) Wipe() {
	s.t.Helper()
	s.dead()
	if err := os.RemoveAll(s.dataDir()); err != nil {
		s.t.Fatal(err)
	}
}

// Save copies the data of a server that has been killed, for Load.
func (s *Server) Save() (dir string) {
	s.t.Helper()
	s.dead()
	dir = filepath.Join(s.t.TempDir(), "saved")
	if err := os.CopyFS(dir, os.DirFS(s.dataDir())); err != nil {
		s.t.Fatal(err)
	}
	return dir
}

// Load puts what Save gave into a server that has been killed: what was written since is
// gone, as after the restoration of a backup.
func (s *Server) Load(dir string) {
	s.t.Helper()
	s.Wipe()
	if err := os.CopyFS(s.dataDir(), os.DirFS(dir)); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Chmod(s.dataDir(), 0o700); err != nil {
		s.t.Fatal(err)
	}
}

func (s *Server) dead() {
	s.t.Helper()
	if s.cmd != nil {
		s.t.Fatalf("etcd %s runs: kill it first", s.name)
	}
}

// servers counts those of this process.
var servers atomic.Uint32

// newIP is a loopback address for one server, so that no process on the machine that
// takes any port takes this one's while it is dead.
func newIP() string {
	n := servers.Add(1)
	pid := uint32(os.Getpid())
	return fmt.Sprintf("127.%d.%d.%d", 64+pid>>8&127, pid&255, 1+n%254)
}

func freePort(t testing.TB, ip string) string {
	t.Helper()
	ln, err := net.Listen("tcp", ip+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}
