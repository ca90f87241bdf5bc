// Package apiserver runs real Kubernetes API servers for tests, on loopback addresses
// of their own, each over an etcd of its own.
//
//   - The binary is built from the module in testdata/kube, which pins it and what it
//     needs; it is kept in the user's cache directory (package tool).
//   - Authorization is RBAC and admission is Kubernetes' default, as in a cluster. There
//     is no controller manager, scheduler or kubelet: a pod is what the test makes it,
//     and a namespace that is deleted stays.
//   - A server keeps its address and its objects from one start to the next, whatever ended it.
//   - Every process that is started here has ended when the test has.
//
// A start takes about three seconds on a quiet machine: tests of one subject share a
// server as subtests of one test, each in a namespace of its own.
//
// It knows nothing of what the objects mean.
package apiserver

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"aether/e2e/cluster/apiserver/setup"
	"aether/e2e/etcdtest"
	"aether/e2e/rig"
	"aether/e2e/tool"
)

// Version of Kubernetes, as in testdata/kube/go.mod.
const Version = "1.37.2"

// patience is how long the server may take to serve: the machine may be busy.
const patience = 2 * time.Minute

// Tool is the server's binary.
var Tool = tool.Tool{
	Name: "kube-apiserver", Env: "AETHER_KUBE_APISERVER",
	Module: "e2e/cluster/apiserver/testdata/kube", Package: "k8s.io/kubernetes/cmd/kube-apiserver",
	LDFlags: "-X k8s.io/component-base/version.gitVersion=v" + Version + // it calls itself v0.0.0 otherwise
		" -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37",
}

// Start starts a server with Kubernetes' own flags beside those that it has here, and
// waits until it is ready. It ends with t.
func Start(t testing.TB, flags ...string) *Server {
	t.Helper()
	bin, err := Tool.Build(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{bin: bin, flags: flags, dir: t.TempDir(), etcd: etcdtest.Start(t)}
	if s.how, err = setup.New(s.dir, newIP(), s.etcd.Endpoint()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Kill(t) })
	s.Restart(t)
	return s
}

// Server is an API server and its etcd. Methods fail the test that they are given
// where they cannot do what they say. Kill, Restart, Pause and Resume are not for
// concurrent use; everything else is.
type Server struct {
	bin   string
	flags []string
	dir   string
	how   *setup.Server
	etcd  *etcdtest.Server

	cmd   *exec.Cmd     // nil: not running
	ended chan struct{} // closed when it has
}

// Addr is the server's address and port.
func (s *Server) Addr() string { return s.how.Addr }

// Etcd is where the objects are kept, below /registry.
func (s *Server) Etcd() *etcdtest.Server { return s.etcd }

// Config is a client's configuration as an administrator (group system:masters),
// whose rate is not limited.
func (s *Server) Config() *rest.Config {
	return &rest.Config{
		Host: "https://" + s.Addr(), BearerToken: s.how.Token,
		TLSClientConfig: rest.TLSClientConfig{CAData: s.how.CA}, QPS: -1,
	}
}

// Client is a client as an administrator.
func (s *Server) Client(t testing.TB) kubernetes.Interface {
	t.Helper()
	return NewClient(t, s.Config())
}

// NewClient makes a client of a configuration.
func NewClient(t testing.TB, c *rest.Config) kubernetes.Interface {
	t.Helper()
	k, err := kubernetes.NewForConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// Kubeconfig writes a file for a configuration that comes from this server, and
// returns its path.
func Kubeconfig(t testing.TB, c *rest.Config) string {
	t.Helper()
	out := clientcmdapi.NewConfig()
	out.Clusters["test"] = &clientcmdapi.Cluster{Server: c.Host, CertificateAuthorityData: c.CAData}
	out.AuthInfos["test"] = &clientcmdapi.AuthInfo{Token: c.BearerToken}
	out.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "test"}
	out.CurrentContext = "test"
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*out, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// namespaces counts those that tests have been given.
var namespaces atomic.Uint32

// Namespace makes a namespace that no other test has.
func (s *Server) Namespace(t testing.TB) string {
	t.Helper()
	name := fmt.Sprintf("test-%d", namespaces.Add(1))
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if _, err := s.Client(t).CoreV1().Namespaces().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	return name
}

// Account makes a ServiceAccount: pods can name it.
func (s *Server) Account(t testing.TB, namespace, name string) {
	t.Helper()
	a := &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name}}
	if _, err := s.Client(t).CoreV1().ServiceAccounts(namespace).Create(t.Context(), a, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// As is a client's configuration as a ServiceAccount that exists, by a token of its
// own: it may do what roles that are bound to it say.
func (s *Server) As(t testing.TB, namespace, account string) *rest.Config {
	t.Helper()
	r, err := s.Client(t).CoreV1().ServiceAccounts(namespace).CreateToken(t.Context(), account, &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c := s.Config()
	c.BearerToken = r.Status.Token
	return c
}

// Compact forgets etcd's history. An API server answers from its own memory of it
// until it is started again: after both, a watch that goes on from an older version
// is told that it is gone (410).
func (s *Server) Compact(t testing.TB) {
	t.Helper()
	c := s.etcd.Client()
	r, err := c.Get(t.Context(), "compact")
	if err == nil {
		_, err = c.Compact(t.Context(), r.Header.Revision)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// Kill ends the API server at once (SIGKILL), and returns when it has ended; etcd goes
// on. One that does not run is left so.
func (s *Server) Kill(t testing.TB) {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill() // it may have ended by itself
	<-s.ended
	s.cmd = nil
}

// Pause stops the server in its tracks (SIGSTOP): its connections stay, and nothing
// moves on them. Kill works on a paused server too.
func (s *Server) Pause(t testing.TB) { s.signal(t, syscall.SIGSTOP) }

// Resume lets it run again.
func (s *Server) Resume(t testing.TB) { s.signal(t, syscall.SIGCONT) }

func (s *Server) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if s.cmd == nil {
		t.Fatal("the API server does not run")
	}
	if err := s.cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// Restart starts a server that has been killed, on its address and with its objects,
// and waits until it is ready.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	if s.cmd != nil {
		t.Fatal("the API server runs")
	}
	if err := s.start(); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	ended := s.ended
	go func() {
		select {
		case <-ended: // nobody waits for the dead
			cancel()
		case <-ctx.Done():
		}
	}()
	client := s.Client(t).CoreV1().RESTClient()
	if err := rig.Until(ctx, func(ctx context.Context) error {
		return client.Get().AbsPath("/readyz").Do(ctx).Error()
	}); err != nil {
		t.Fatalf("the API server is not ready: %v; its log ends:\n%s", err, s.tail())
	}
}

func (s *Server) path(name string) string { return filepath.Join(s.dir, name) }

func (s *Server) start() error {
	log, err := os.OpenFile(s.path("log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close() // the child has its own
	cmd := exec.Command(s.bin, slices.Concat(s.how.Args, s.flags)...)
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
		return fmt.Errorf("start the API server: %w", err)
	}
	s.cmd, s.ended = cmd, ended
	return nil
}

func (s *Server) tail() []byte {
	b, err := os.ReadFile(s.path("log"))
	if err != nil {
		return []byte(err.Error())
	}
	return b[max(0, len(b)-4000):]
}

// servers counts those of this process.
var servers atomic.Uint32

// newIP is a loopback address for one server, so that no process on the machine that
// takes any port takes this one's while it is dead. They are others than etcdtest's.
func newIP() net.IP {
	pid := os.Getpid()
	return net.IPv4(127, byte(192+pid>>8&31), byte(pid), byte(1+servers.Add(1)%254))
}
