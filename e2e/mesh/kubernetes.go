package mesh

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"aether/e2e/cluster/apiserver/setup"
	"aether/e2e/rig"
)

// apiServer is that of a mesh.
type apiServer struct {
	how    *setup.Server
	client *http.Client
	proc   *rig.Proc // the last one that ran
}

func (m *Mesh) kubeconfig() string { return filepath.Join(m.Rig.Dir, "kubeconfig") }

// StartAPIServer runs the API server, over etcd, which runs, and returns once it serves.
// Pods are its objects from then on; those of before are not.
func (m *Mesh) StartAPIServer(ctx context.Context) error {
	m.mu.Lock()
	a := m.api
	m.mu.Unlock()
	first := a == nil
	node := m.Rig.Nodes[0]
	if first {
		dir := filepath.Join(m.Rig.Dir, "apiserver")
		if err := os.Mkdir(dir, 0o755); err != nil {
			return fmt.Errorf("mesh: %w", err)
		}
		how, err := setup.New(dir, node.IP4.AsSlice(), etcdURL)
		if err != nil {
			return fmt.Errorf("mesh: set up an API server: %w", err)
		}
		if err := os.WriteFile(m.kubeconfig(), how.Kubeconfig(), 0o600); err != nil {
			return fmt.Errorf("mesh: %w", err)
		}
		pool := x509.NewCertPool()
		pool.AppendCertsFromPEM(how.CA)
		a = &apiServer{how: how, client: &http.Client{Transport: &http.Transport{DialContext: node.Dial, TLSClientConfig: &tls.Config{RootCAs: pool}}}}
	}
	p, err := m.Rig.StartProcess(&node.Space, "apiserver", append([]string{m.o.Registry.APIServer}, a.how.Args...)...)
	if err != nil {
		return err
	}
	m.mu.Lock()
	a.proc, m.api = p, a
	m.mu.Unlock()
	if err := p.Ready(ctx, func(ctx context.Context) error {
		_, err := m.API(ctx, http.MethodGet, "/readyz", "", nil)
		return err
	}); err != nil || !first {
		return err
	}
	m.OnClose(a.client.CloseIdleConnections)
	for _, ns := range []string{"aether-system", "shop"} {
		if err := m.create(ctx, "/api/v1/namespaces", fmt.Sprintf(`{"apiVersion":"v1","kind":"Namespace","metadata":{"name":%q}}`, ns)); err != nil {
			return err
		}
	}
	return nil
}

// APIServer is the API server's process, the last one that ran; nil: none did.
func (m *Mesh) APIServer() *rig.Proc {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.api == nil {
		return nil
	}
	return m.api.proc
}

// refusal is an answer other than 2xx.
type refusal struct {
	code int
	text string
}

func (r *refusal) Error() string { return r.text }

// requestTime bounds a request to an API server that hangs.
const requestTime = 10 * time.Second

// API asks the API server, as its administrator, and returns the answer's body; a status other
// than 2xx is an error. kind is the content's type; empty: there is no content.
func (m *Mesh) API(ctx context.Context, method, path, kind string, body []byte) ([]byte, error) {
	m.mu.Lock()
	a := m.api
	m.mu.Unlock()
	if a == nil {
		return nil, errors.New("mesh: there is no API server")
	}
	ctx, cancel := context.WithTimeout(ctx, requestTime)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "https://"+a.how.Addr+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+a.how.Token)
	if kind != "" {
		req.Header.Set("Content-Type", kind)
	}
	res, err := a.client.Do(req)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err == nil && res.StatusCode/100 != 2 {
		err = &refusal{res.StatusCode, fmt.Sprintf("%s %s: %s: %.1000s", method, path, res.Status, b)}
	}
	return b, err
}

// create makes an object, in JSON or YAML; one that is there is left as it is.
func (m *Mesh) create(ctx context.Context, path, object string) error {
	_, err := m.API(ctx, http.MethodPost, path, "application/yaml", []byte(object))
	if r := new(refusal); errors.As(err, &r) && r.code == http.StatusConflict {
		return nil
	}
	return err
}

// ApplyObject makes or changes an object by server-side apply. path is the object's own.
func (m *Mesh) ApplyObject(ctx context.Context, path, yaml string) error {
	_, err := m.API(ctx, http.MethodPatch, path+"?fieldManager=mesh&force=true", "application/apply-patch+yaml", []byte(yaml))
	return err
}

// createObject makes the pod's object, of a pod that runs and is not ready.
func (m *Mesh) createObject(ctx context.Context, pod *rig.Pod, p Pod, yaml string) error {
	if m.APIServer() == nil {
		return nil
	}
	account := fmt.Sprintf(`{"apiVersion":"v1","kind":"ServiceAccount","metadata":{"name":%q}}`, p.Account)
	if err := m.create(ctx, "/api/v1/namespaces/"+p.Namespace+"/serviceaccounts", account); err != nil {
		return err
	}
	if err := m.create(ctx, "/api/v1/namespaces/"+p.Namespace+"/pods", yaml); err != nil {
		return err
	}
	return m.podStatus(ctx, pod, false)
}

// SetReady says to the API server, as a kubelet would, whether a pod is ready.
func (m *Mesh) SetReady(ctx context.Context, name string, ready bool) error {
	return m.podStatus(ctx, m.Pod(name), ready)
}

func (m *Mesh) podStatus(ctx context.Context, pod *rig.Pod, ready bool) error {
	is := map[bool]string{false: "False", true: "True"}[ready]
	ip := pod.IP4.String()
	b, err := json.Marshal(map[string]any{"status": map[string]any{
		"phase": "Running", "hostIP": pod.Node.IP4.String(), "podIP": ip, "podIPs": []any{map[string]string{"ip": ip}},
		"conditions": []any{map[string]string{"type": "Ready", "status": is}},
	}})
	if err != nil {
		return err
	}
	_, err = m.API(ctx, http.MethodPatch, m.objectPath(pod.Name)+"/status", "application/merge-patch+json", b)
	return err
}

func (m *Mesh) objectPath(pod string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return "/api/v1/namespaces/" + m.namespaces[pod] + "/pods/" + pod
}

// deleteObject deletes the pod's object, if there is an API server. One that is gone is no error.
func (m *Mesh) deleteObject(pod string, grace int) error {
	if m.APIServer() == nil {
		return nil
	}
	_, err := m.API(context.Background(), http.MethodDelete, fmt.Sprintf("%s?gracePeriodSeconds=%d", m.objectPath(pod), grace), "", nil)
	if r := new(refusal); errors.As(err, &r) && r.code == http.StatusNotFound {
		return nil
	}
	return err
}

// ClusterIP is the address that the API server has given a Service, once it has.
func (m *Mesh) ClusterIP(ctx context.Context, namespace, name string) (ip string, err error) {
	err = rig.Until(ctx, func(ctx context.Context) error {
		b, err := m.API(ctx, http.MethodGet, "/api/v1/namespaces/"+namespace+"/services/"+name, "", nil)
		if err != nil {
			return err
		}
		var s struct {
			Spec struct{ ClusterIP string }
		}
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		if ip = s.Spec.ClusterIP; strings.Count(ip, ".") != 3 {
			return fmt.Errorf("the address of Service %s/%s is %q", namespace, name, ip)
		}
		return nil
	})
	return ip, err
}
