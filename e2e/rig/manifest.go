package rig

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"maps"
	"net/netip"
	"strings"

	"sigs.k8s.io/yaml"
)

// PodManifest says what PodYAML cannot see in a Pod.
type PodManifest struct {
	Namespace   string            // empty: "demo"
	Account     string            // ServiceAccount; empty: the pod's name
	Ports       string            // annotation endpoint.aether.io/ports ("8080,9000=tcp"); empty: none
	Annotations map[string]string // further ones; they win
	Labels      map[string]string // further ones; they win
	Volumes     map[string]string // by name, the driver of an inline csi volume; empty: an emptyDir. nil: none is spoken of
}

// PodYAML is the Kubernetes document of the pod as the proxy's file source reads
// it: managed, running and ready on its node, with its namespace's path in the
// annotation file.aether.io/netns.
func PodYAML(p *Pod, m PodManifest) string {
	ann := map[string]string{"file.aether.io/netns": p.NetNS}
	if m.Ports != "" {
		ann["endpoint.aether.io/ports"] = m.Ports
	}
	maps.Copy(ann, m.Annotations)
	labels := map[string]string{"aether.io/managed": "true"}
	maps.Copy(labels, m.Labels)

	var ips []map[string]string
	for _, ip := range p.IPs() {
		ips = append(ips, map[string]string{"ip": ip.String()})
	}
	var volumes []map[string]any
	for name, driver := range m.Volumes {
		v := map[string]any{"name": name, "emptyDir": map[string]any{}}
		if driver != "" {
			v = map[string]any{"name": name, "csi": map[string]any{"driver": driver}}
		}
		volumes = append(volumes, v)
	}
	ns := cmp.Or(m.Namespace, "demo")
	return document(map[string]any{
		"apiVersion": "v1", "kind": "Pod",
		"metadata": map[string]any{
			"namespace": ns, "name": p.Name, "uid": p.UID(ns),
			"labels": labels, "annotations": ann,
		},
		"spec": map[string]any{
			"serviceAccountName": cmp.Or(m.Account, p.Name), "nodeName": p.Node.Name,
			"containers": []map[string]any{{"name": "app", "image": "rig"}}, "volumes": volumes,
		},
		"status": map[string]any{
			"phase": "Running", "hostIP": p.Node.IP4.String(), "podIP": p.IP4.String(), "podIPs": ips,
			"conditions": []map[string]any{{"type": "Ready", "status": "True"}},
		},
	})
}

// UID is what PodYAML says is the pod's in a namespace of Kubernetes.
func (p *Pod) UID(namespace string) string { return uid("Pod", namespace, p.NSName()) }

// ServiceManifest of ServiceYAML.
type ServiceManifest struct {
	Namespace  string       // empty: "demo"
	Name       string       // the ServiceAccount of the pods behind it
	ClusterIPs []netip.Addr // addresses that belong to nobody; the first is clusterIP
	Ports      []uint16     // each maps to the same port of the pods
	UserOwned  bool         // leaves out the label aether.io/mesh-service of generated Services
}

// ServiceYAML is the Kubernetes document of a Service, generated or user-owned.
func ServiceYAML(m ServiceManifest) string {
	ns := cmp.Or(m.Namespace, "demo")
	meta := map[string]any{"namespace": ns, "name": m.Name, "uid": uid("Service", ns, m.Name)}
	if !m.UserOwned {
		meta["labels"] = map[string]string{"aether.io/mesh-service": "true"}
	}
	spec := map[string]any{"type": "ClusterIP"}
	var ips []string
	for _, ip := range m.ClusterIPs {
		ips = append(ips, ip.String())
	}
	if len(ips) > 0 {
		spec["clusterIP"], spec["clusterIPs"] = ips[0], ips
	}
	var ports []map[string]any
	for _, p := range m.Ports {
		ports = append(ports, map[string]any{"name": fmt.Sprintf("p%d", p), "port": p, "targetPort": p, "protocol": "TCP"})
	}
	spec["ports"] = ports
	return document(map[string]any{"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": spec})
}

// document renders one object of a YAML stream, its separator in front.
func document(obj map[string]any) string {
	b, err := yaml.Marshal(obj)
	if err != nil {
		panic("rig: marshal " + fmt.Sprint(obj["kind"]) + ": " + err.Error()) // only strings, numbers and maps of them
	}
	return "---\n" + string(b)
}

// uid makes an object's UID: the same one for the same object in every run.
func uid(parts ...string) string {
	h := fnv.New128a()
	h.Write([]byte(strings.Join(parts, "/")))
	b := h.Sum(nil)
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
